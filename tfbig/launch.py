"""Starts a training command again when it fails: `tfbig launch --restarts=5 -- horovodrun ...`."""

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType

from tfbig.checkpoint import latest
from tfbig.command import EXIT_SIGNAL, EXIT_USER_ERROR, run_command
from tfbig.config import RunConfig
from tfbig.errors import UserError
from tfbig.flags import Flags
from tfbig.run_folder import RunFolder

_FRUITLESS = 3  # failures in a row without a new checkpoint after which no restart will help


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """How often a command is started again; it stands behind `--`, as it would alone."""

    restarts: int = 3
    """Restarts after failures, in all."""
    restart_wait: float = 10.0
    """Seconds before a restart, in which nodes may come back and ports are let go."""


class Supervisor:
    """Runs a command until it succeeds, is told to stop, or has failed too often.

    SIGTERM, SIGINT and SIGUSR1 are passed on to the command, which saves; it isn't started again.

    Args:
      config: how often.
      command: words of the command; a `--run_dir` among them tells whether it got anywhere.
    """

    def __init__(self, config: LaunchConfig, command: Sequence[str]) -> None:
        self._config, self._command = config, list(command)
        self._checkpoints = RunFolder(_run_dir(command)).checkpoints_dir
        self._process: subprocess.Popen | None = None
        self._signal = 0

    def run(self) -> int:
        """Returns the exit code: the command's last one, or 143 after a signal."""
        handled = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
        previous = {number: signal.signal(number, self._pass_on) for number in handled}
        try:
            return self._attempts()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _attempts(self) -> int:
        fruitless = 0
        for attempt in range(self._config.restarts + 1):
            before, start = self._step(), time.monotonic()
            code = self._run_once()
            if self._signal:
                return EXIT_SIGNAL
            if code in (0, EXIT_USER_ERROR, EXIT_SIGNAL):
                return code
            after = self._step()
            fruitless = fruitless + 1 if after == before else 0
            self._say(
                f"code {code} after {time.monotonic() - start:.0f} s, newest checkpoint: "
                f"{f'step {after}' if after >= 0 else 'none'}"
            )
            if fruitless >= _FRUITLESS:
                self._say(f"{fruitless} failures without a new checkpoint: no restart will help")
                return code
            if attempt == self._config.restarts:
                break
            self._say(f"restart {attempt + 1} of {self._config.restarts}")
            self._wait()
            if self._signal:
                return EXIT_SIGNAL
        return code

    def _run_once(self) -> int:
        try:
            # A session of its own: Ctrl-C reaches it once, by this process.
            self._process = subprocess.Popen(self._command, start_new_session=True)
        except OSError as error:
            raise UserError(f"cannot start {self._command[0]}: {error.strerror}") from error
        if self._signal:  # it came in between
            self._process.send_signal(self._signal)
        code = self._process.wait()
        self._process = None
        return code if code >= 0 else 128 - code

    def _wait(self) -> None:
        deadline = time.monotonic() + self._config.restart_wait
        while time.monotonic() < deadline and not self._signal:
            time.sleep(0.1)

    def _step(self) -> int:
        newest = latest(self._checkpoints)
        return -1 if newest is None else newest.step

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._signal = number
        if self._process is not None:
            self._process.send_signal(number)

    def _say(self, text: str) -> None:
        print(f"tfbig launch: {text}", file=sys.stderr, flush=True)


def _run_dir(command: Sequence[str]) -> str:
    """Returns the run's folder that a training command names, as train does.

    >>> _run_dir(["python", "-m", "tfbig.train", "--preset=gpt2_124m"])
    'runs/gpt2_124m'
    """
    values = {"run_dir": "", "preset": RunConfig.preset}
    for word, following in zip(command, [*command[1:], ""], strict=True):
        name, has_value, value = word.lstrip("-").partition("=")
        if word.startswith("-") and name in values:
            values[name] = value if has_value else following
    return values["run_dir"] or f"runs/{values['preset']}"


def _body(arguments: Sequence[str]) -> int:
    summary = "starts a command again when it fails: tfbig launch --restarts=5 -- COMMAND ..."
    flags = Flags("launch", (LaunchConfig,), summary)
    given = flags.parse(arguments, positional=True)
    command = given.pop("arguments")
    config = LaunchConfig(**given)
    if not command:
        raise UserError("give the command to run behind --, e.g. -- horovodrun -np 2 python ...")
    for name in ("restarts", "restart_wait"):
        if getattr(config, name) < 0:
            raise UserError(f"--{name}={getattr(config, name)} must be at least 0.")
    return Supervisor(config, command).run()


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command and exits."""
    run_command("launch", _body, sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    main()
