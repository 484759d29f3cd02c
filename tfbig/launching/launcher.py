"""One launcher of a job that others on other hosts belong to, too: meets them, starts its ranks.

`python -m tfbig.launching.launcher JSON` is what `tfbig launch --cluster=...` starts, again after a
failure. TensorFlow-free.
"""

import dataclasses
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from tfbig.command import EXIT_SIGNAL, run_command
from tfbig.durable_file import write_atomic
from tfbig.errors import RunError, UserError
from tfbig.launching.place import Place, Slot, environment_of, tf_config
from tfbig.launching.ranks import Ranks
from tfbig.launching.rendezvous import Meeting, Stopped, choose_card

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LauncherJob:
    """What one launcher does; goes over its command line as JSON.

    Args:
      place: among the launchers.
      command: words of each rank's command.
      network_interface: the user's choice, or "".
      start_timeout: seconds in which all must have met.
      num_processes: ranks in all that there must be; 0 for any number.
      reason_path: file for the reason of a failure; "" for none.
    """

    place: Place
    command: Sequence[str]
    network_interface: str = ""
    start_timeout: float = 600.0
    num_processes: int = 0
    reason_path: str = ""

    def to_words(self) -> list[str]:
        """Returns the command line that runs it."""
        text = json.dumps(dataclasses.asdict(self))
        return [sys.executable, "-m", "tfbig.launching.launcher", text]

    @classmethod
    def from_json(cls, text: str) -> "LauncherJob":
        """Returns what `to_words` has written."""
        values = json.loads(text)
        return cls(**values | {"place": Place(*values["place"])})


class Launcher:
    """Runs a LauncherJob."""

    def __init__(self, job: LauncherJob) -> None:
        self._job = job
        self._ranks: Ranks | None = None
        self._signal = 0

    def run(self) -> int:
        """Returns the exit code: the first failed rank's, 143 after a signal."""
        for number in _SIGNALS:
            signal.signal(number, self._pass_on)
        job = self._job
        try:
            with Meeting(job.place, job.start_timeout, lambda: bool(self._signal)) as met:
                slots, everyone = met.meet()
                own = self._check(slots, [one["count"] for one in everyone])
                card = choose_card(job.place.number, everyone, job.network_interface)
                self._say(slots, own, card)
                addresses = {one["host"]: one["address"] for one in reversed(everyone)}
                commands = {}
                for slot in own:
                    config = tf_config(slots, slot.rank, addresses, job.place.port)
                    environment = environment_of(slot, met.address, job.place.port, card)
                    environment = {"TF_CONFIG": config} | os.environ | environment
                    commands[slot.rank] = (job.command, environment)
                self._ranks = Ranks(commands)
                if self._signal:  # it came in between
                    self._ranks.signal(self._signal)
                code, reason = self._ranks.wait()
        except Stopped:
            return EXIT_SIGNAL
        except (RunError, UserError) as error:
            self._write_reason(f"tfbig launch: {error}")
            raise
        if code and not self._signal:
            self._write_reason(reason)
            print(f"tfbig launch: {reason}", file=sys.stderr, flush=True)
        return EXIT_SIGNAL if self._signal else code

    def _check(self, slots: Sequence[Slot], counts: Sequence[int]) -> Sequence[Slot]:
        """Returns this launcher's ranks, when there are as many in all as there should be."""
        wanted = self._job.num_processes
        if wanted and len(slots) != wanted:
            raise UserError(
                f"--num_processes={wanted}, but {len(counts)} launchers start "
                f"{' + '.join(map(str, counts))} = {len(slots)} ranks: change either."
            )
        first = sum(counts[: self._job.place.number])
        return slots[first : first + counts[self._job.place.number]]

    def _say(self, slots: Sequence[Slot], own: Sequence[Slot], card: str) -> None:
        if len(slots) > 1:
            hosts = len({slot.host for slot in slots})
            print(
                f"tfbig launch: {own[0].host} starts rank{'s' * (len(own) > 1)} "
                f"{'-'.join(dict.fromkeys((str(own[0].rank), str(own[-1].rank))))} of {len(slots)} "
                f"on {hosts} host{'s' * (hosts != 1)}; network card {card}",
                file=sys.stderr,
                flush=True,
            )

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._signal = number
        if self._ranks is not None:
            self._ranks.signal(number)

    def _write_reason(self, reason: str) -> None:
        if self._job.reason_path:
            write_atomic(Path(self._job.reason_path), reason.encode())


def _body(arguments: Sequence[str]) -> int:
    return Launcher(LauncherJob.from_json(arguments[0])).run()


if __name__ == "__main__":
    run_command("launch", _body, sys.argv[1:])
