"""What finding equal documents costs: `python -m benchmarks.duplicates [--millions=N]`.

Writes the digests of N million documents (the Pile has 210.6), a tenth of them copies, as a
preparation's chunks hold them, and goes through all ranges of hashes in one process. Seconds are of
CPU, user and system; memory is the process's own (RssAnon) above what it had before, at its peak.
"""

import argparse
import json
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from data_pipeline.duplicates import DuplicateFinder
from data_pipeline.plan import Plan
from data_pipeline.shuffling import PartStores
from data_pipeline.work import Result, WorkFolder
from tfbig.config import PrepareConfig

DOCUMENTS_OF_A_CHUNK = 170_000  # of the Pile's, in 1 GiB
PART = ("train", "text")


def write_chunks(folder: Path, num_documents: int) -> dict[str, Result]:
    """Writes all chunks' digests and returns what the tokenizing stage would say of them."""
    generator = np.random.default_rng(0)
    results: dict[str, Result] = {}
    for first in range(0, num_documents, DOCUMENTS_OF_A_CHUNK):
        count = min(DOCUMENTS_OF_A_CHUNK, num_documents - first)
        keys = generator.integers(0, 2**64, count, np.uint64)
        keys[: count // 10] = np.arange(count // 10, dtype=np.uint64) * np.uint64(2**44)
        path = folder / "tokens" / f"chunk-{first}"
        path.mkdir(parents=True)
        for suffix in ("keys", "checks"):
            keys.tofile(path / f"tokens.{suffix}")
        part = {
            "split": PART[0],
            "source": PART[1],
            "first": 0,
            "documents": count,
            "tokens": count,
        }
        results[path.name] = {"parts": [part]}
    return results


def own_memory() -> int:
    """Returns the bytes of this process that are no file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


def main() -> None:
    """Prints the measurement."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--millions", type=float, default=20, help="documents; default 20")
    num_documents = int(1e6 * parser.parse_args().millions)
    ended, most = threading.Event(), [0]

    def watch() -> None:
        while not ended.wait(0.01):
            most[0] = max(most[0], own_memory())

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parts = [PartStores(PART, write_chunks(folder, num_documents))]
        plan = Plan({}, PrepareConfig(remove_duplicates=True), [])
        finder = DuplicateFinder("benchmark", parts, plan, folder, WorkFolder(folder))
        before = own_memory()
        watcher = threading.Thread(target=watch)
        watcher.start()
        start = time.process_time()
        found = finder.run()
        seconds = time.process_time() - start
        ended.set()
        watcher.join()
    print(json.dumps(found))
    ranges = len(finder.sizes())
    print(
        f"{num_documents / 1e6:.0f} million documents in {ranges} ranges: {seconds:.1f} s of CPU, "
        f"{(most[0] - before) / 1e9:.2f} GB at the peak of one range"
    )


if __name__ == "__main__":
    main()
