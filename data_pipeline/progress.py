"""How far a stage is: a bar on a terminal, a line now and then elsewhere."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from data_pipeline.work import WorkFolder

_LOOK_EVERY = 1.0  # seconds
_SAY_EVERY = 30.0  # seconds between lines where there is no terminal


@contextlib.contextmanager
def shown(
    what: str, sizes: Mapping[str, int], work: WorkFolder, say: Callable[[str], None] | None
) -> Iterator[None]:
    """Shows the progress of a stage while the block runs, whichever process does its items.

    Args:
      what: the stage.
      sizes: bytes of each item.
      work: where results and claims are.
      say: is handed a line now and then; None shows nothing.
    """
    if say is None or not any(sizes.values()):
        yield
        return
    ended = threading.Event()
    show = _bar if sys.stderr.isatty() else _lines
    thread = threading.Thread(target=show, args=(what, sizes, work, say, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def bytes_done(sizes: Mapping[str, int], work: WorkFolder) -> int:
    """Returns how many bytes of the items are done, those in flight included."""
    done = work.done_items()
    total = sum(size for item, size in sizes.items() if item in done)
    with contextlib.suppress(OSError):
        for item, progress in work.in_flight().items():
            if item in sizes and item not in done:
                total += min(progress, sizes[item])
    return total


def _bar(
    what: str,
    sizes: Mapping[str, int],
    work: WorkFolder,
    say: Callable[[str], None],
    ended: threading.Event,
) -> None:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("  {task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=sum(sizes.values()))
        while not ended.wait(_LOOK_EVERY):
            progress.update(task, completed=bytes_done(sizes, work))


def _lines(
    what: str,
    sizes: Mapping[str, int],
    work: WorkFolder,
    say: Callable[[str], None],
    ended: threading.Event,
) -> None:
    total, start = sum(sizes.values()), time.monotonic()
    before = bytes_done(sizes, work)
    while not ended.wait(_SAY_EVERY):
        done = bytes_done(sizes, work)
        rate = (done - before) / (time.monotonic() - start)
        left = f", {(total - done) / rate / 60:.0f} min left" if rate else ""
        say(
            f"  {what}: {done / 1e9:.2f} of {total / 1e9:.2f} GB, {rate / 1e6:.0f} MB/s{left} "
            f"({sum(item in work.done_items() for item in sizes):,} of {len(sizes):,} items)"
        )
