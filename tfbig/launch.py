"""Starts a training command, alone or as ranks on many hosts, and again when it fails.

`tfbig launch --restarts=5 -- horovodrun ...` watches one command; with --shrunk another one, on
fewer ranks, takes over where the first gets nowhere. With --cluster it starts the
ranks of this host itself, and meets the launchers of the other hosts: `srun tfbig launch
--cluster=slurm -- python -m tfbig.train ...`.
"""

import contextlib
import dataclasses
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import IO

from tfbig.checkpoint import latest
from tfbig.command import EXIT_SIGNAL, EXIT_USER_ERROR, run_command
from tfbig.config import RunConfig
from tfbig.errors import UserError
from tfbig.flags import Flags
from tfbig.launching import sagemaker
from tfbig.launching.launch_config import LaunchConfig
from tfbig.launching.launcher import LauncherJob
from tfbig.launching.place import place_by_hosts, place_by_mpi, place_by_slurm
from tfbig.run_folder import RunFolder

_FRUITLESS = 3  # failures in a row without a new checkpoint after which no restart will help
# What horovodrun, which itself ends with 1, says last of the first rank that failed. The ranks' own
# lines begin with their number.
_FIRST_RANKS_CODE = re.compile(rb"(?:horovodrun: .*)?Exit code: (\d+)\s*")
_PIPE_PATIENCE = 2.0  # seconds for the end of a pipe that a grandchild may hold


class Supervisor:
    """Runs a command until it succeeds, is told to stop, or has failed too often.

    SIGTERM, SIGINT and SIGUSR1 are passed on to the command, which saves; it isn't started again.
    SIGUSR1 goes on as SIGTERM, as horovodrun and shells die of the other; mpirun, which hands it to
    the ranks and kills them soon after SIGTERM, gets it as it is.

    Args:
      config: how often.
      command: words of the command.
      run_dir: the run's folder, which tells whether it got anywhere.
    """

    def __init__(self, config: LaunchConfig, command: Sequence[str], run_dir: str) -> None:
        self._config, self._command = config, list(command)
        self._shrunk = shlex.split(config.shrunk)  # until it has taken over
        self._checkpoints = RunFolder(run_dir).checkpoints_dir
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
            if self._shrunk and fruitless >= self._config.shrink_after:
                self._command, self._shrunk, fruitless = self._shrunk, [], 0
                self._say(f"the smaller layout takes over: {shlex.join(self._command)}")
            elif fruitless >= max(_FRUITLESS, self._config.shrink_after * bool(self._shrunk)):
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
        said = _Said() if any("horovodrun" in word for word in self._command) else None
        try:
            # A session of its own: Ctrl-C reaches it once, by this process.
            self._process = subprocess.Popen(
                self._command,
                start_new_session=True,
                stderr=None if said is None else subprocess.PIPE,
            )
        except OSError as error:
            raise UserError(f"cannot start {self._command[0]}: {error.strerror}") from error
        if self._signal:  # it came in between
            self._process.send_signal(self._passed(self._signal))
        if said is not None:
            said.read(self._process.stderr)
        code = self._process.wait()
        self._process = None
        if code == 1 and said is not None:
            code = said.first_ranks_code() or code
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
            self._process.send_signal(self._passed(number))

    def _passed(self, number: int) -> int:
        """Returns the signal that has this command save, for one that came here."""
        by_mpi = Path(self._command[0]).name in ("mpirun", "mpiexec")
        return signal.SIGTERM if number == signal.SIGUSR1 and not by_mpi else number

    def _say(self, text: str) -> None:
        print(f"tfbig launch: {text}", file=sys.stderr, flush=True)


class _Said:
    """What a command says on standard error: passed on, and searched for a rank's exit code."""

    def __init__(self) -> None:
        self._code = 0

    def read(self, stream: IO[bytes] | None) -> None:
        """Starts to pass it on."""
        self._thread = threading.Thread(target=self._pass_on, args=(stream,), daemon=True)
        self._thread.start()

    def first_ranks_code(self) -> int:
        """Returns the code that horovodrun told of, 0 for none; after the command's end."""
        self._thread.join(_PIPE_PATIENCE)
        return self._code

    def _pass_on(self, stream: IO[bytes]) -> None:
        for line in stream:
            if match := _FIRST_RANKS_CODE.fullmatch(line):
                self._code = int(match[1])
            with contextlib.suppress(OSError):  # the command must not wait for our reader
                sys.stderr.buffer.write(line)
                sys.stderr.buffer.flush()


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


def _check(config: LaunchConfig) -> None:
    """Checks numbers.

    Raises:
      UserError: one makes no sense.
    """
    numbers = "restarts restart_wait processes_per_host num_processes port shrink_after".split()
    for name in numbers:
        least = int(name == "shrink_after")
        if not getattr(config, name) >= least:
            raise UserError(
                f"--{name}={getattr(config, name)} must be at least {least}: change it."
            )
    if config.shrunk and config.cluster != "none":
        raise UserError(
            f"--shrunk is a whole command, which --cluster={config.cluster} cannot start on fewer"
            " hosts: leave it out, or start that launcher anew on those that are left."
        )
    if config.port > 65535:
        raise UserError(f"--port={config.port} is no port: give one below 65536.")
    if not config.start_timeout > 0:
        raise UserError(f"--start_timeout={config.start_timeout} must be above 0: change it.")
    if config.hosts and config.cluster not in ("hosts", "mpi"):
        raise UserError(f"--hosts goes with --cluster=hosts, not {config.cluster}: leave it out.")
    if config.cluster == "hosts" and not config.hosts:
        raise UserError("--cluster=hosts needs --hosts: give all of them, as --hosts=a,b.")


def _check_shrunk(shrunk: str, run_dir: str) -> None:
    """Checks that the command that may take over goes on with the same run.

    Raises:
      UserError: it can't be read, or names another run.
    """
    if not shrunk:
        return
    try:
        words = shlex.split(shrunk)
    except ValueError as error:
        raise UserError(f"--shrunk={shrunk} is no command ({error}): change it.") from error
    other = _run_dir(words)
    if other != run_dir:
        raise UserError(
            f"--shrunk trains in {other}, the command behind -- in {run_dir}: give both the same"
            " --run_dir."
        )


def _launch_here(config: LaunchConfig, command: Sequence[str]) -> int:
    """Runs a command alone, or as this host's ranks of a cluster that Slurm or flags describe."""
    if not command:
        raise UserError("give the command to run behind --, e.g. -- horovodrun -np 2 python ...")
    run_dir = _run_dir(command)
    if config.cluster == "none":
        _check_shrunk(config.shrunk, run_dir)
        return Supervisor(config, command, run_dir).run()
    hosts = [host.strip() for host in config.hosts.split(",") if host.strip()]
    if config.cluster == "slurm":
        place = place_by_slurm(config)
    elif config.cluster == "mpi":
        place = place_by_mpi(hosts, config)
    else:
        place = place_by_hosts(hosts, config.host_index, config)
    job = LauncherJob(
        place=place,
        command=command,
        network_interface=config.network_interface,
        start_timeout=config.start_timeout,
        num_processes=config.num_processes,
    )
    return Supervisor(config, job.to_words(), run_dir).run()


def _launch_on_sagemaker(config: LaunchConfig, command: Sequence[str]) -> int:
    """Trains as SageMaker's files say; whatever fails is written where SageMaker looks for it."""
    root = Path(config.sagemaker_root)
    try:
        return _train_on_sagemaker(config, root, command)
    except Exception as error:
        sagemaker.write_failure(root, f"tfbig launch: {error}")
        raise


def _train_on_sagemaker(config: LaunchConfig, root: Path, command: Sequence[str]) -> int:
    """Trains as SageMaker's files say, and leaves there what SageMaker wants to find."""
    job = sagemaker.read_job(root)
    settings = Flags("launch", (LaunchConfig,), "").parse(
        [f"--{name}={value}" for name, value in sagemaker.launcher_settings(job).items()]
    )
    config = dataclasses.replace(config, **settings)
    _check(config)
    train = [sys.executable, "-m", "tfbig.train", *sagemaker.training_flags(job), *command]
    place = place_by_hosts(job.hosts, job.index, config)
    ranks = place.num_processes * len(job.hosts)
    if ranks > 1 and not any(word.startswith("--strategy=") for word in train):
        train.append("--strategy=horovod")
    reason_path = root / "output/.tfbig-reason"
    reason_path.parent.mkdir(parents=True, exist_ok=True)
    launcher = LauncherJob(
        place=place,
        command=train,
        network_interface=config.network_interface or job.network_interface,
        start_timeout=config.start_timeout,
        num_processes=ranks,
        reason_path=str(reason_path),
    )
    run_dir = _run_dir(train)
    code = Supervisor(config, launcher.to_words(), run_dir).run()
    if code not in (0, EXIT_SIGNAL):
        reason = sagemaker.read_reason(reason_path) or f"exit code {code}"
        sagemaker.write_failure(root, f"{job.current_host}: {reason}")
    elif job.index == 0:
        sagemaker.publish(root, run_dir)
    reason_path.unlink(missing_ok=True)
    return code


def _body(arguments: Sequence[str]) -> int:
    summary = "starts ranks or a command, again when it fails: tfbig launch ... -- COMMAND ..."
    flags = Flags("launch", (LaunchConfig,), summary)
    given = flags.parse(arguments, positional=True)
    command = given.pop("arguments")
    config = LaunchConfig(**given)
    _check(config)
    if config.cluster == "sagemaker":
        return _launch_on_sagemaker(config, command)
    return _launch_here(config, command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command and exits."""
    run_command("launch", _body, sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    main()
