"""What every entry point shares: exit codes, one-line errors, a quiet start of TensorFlow."""

import errno
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Sequence

from tfbig.errors import RunError, UserError
from tfbig.together import SharedError

EXIT_FAULT = 1  # ours or the machine's, with a traceback
EXIT_USER_ERROR = 2  # a user's mistake, one line
EXIT_SIGNAL = 143  # stopped by a signal after saving
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE)
_OTHER_RANK_PATIENCE = 8.0  # seconds in which the launcher ends this rank for rank 0's error
_OTHER_RANKS_NOTICE = 1.0  # seconds in which the others notice that this rank has failed
# Set by launchers to the number of ranks, the one that stands inside another's first.
SIZES = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
# Set by a process that begins anew by exec(2), to seconds since 1970.
BEGAN_VARIABLE = "TFBIG_BEGAN"
_LAUNCHERS = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")  # these end the other ranks
_FAILED_RANK_PATIENCE = 15.0  # seconds in which the failed rank prints its error and ends


def launched_rank() -> int:
    """Returns this process's rank as its launcher set it, 0 without one."""
    for name in ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    try:  # a damaged TF_CONFIG is complained about where it is used
        config = json.loads(os.environ.get("TF_CONFIG") or "{}")
        has_chief = config["task"]["type"] == "worker" and "chief" in config["cluster"]
        return int(config["task"]["index"]) + has_chief
    except (ValueError, TypeError, KeyError):
        return 0


def is_launched() -> bool:
    """Returns whether a launcher, Slurm or TF_CONFIG says that there are several ranks."""
    for name in SIZES:
        if os.environ.get(name, "1") not in ("", "1"):
            return True
    try:
        cluster = json.loads(os.environ.get("TF_CONFIG") or "{}")["cluster"]
        return sum(len(members) for members in cluster.values()) > 1
    except (ValueError, TypeError, KeyError, AttributeError):
        return False


def quiet_tensorflow() -> None:
    """Keeps TensorFlow's C++ start-up notices off the screen; call before importing it.

    A level that the user has set stays.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # errors still show


def run_command(
    name: str, body: Callable[[Sequence[str]], int | None], arguments: Sequence[str]
) -> None:
    """Runs an entry point's body and leaves the process with its exit code.

    Args:
      name: the command, e.g. "train", for messages.
      body: takes the arguments, returns an exit code or None for 0.
      arguments: what follows the command's name.

    A UserError becomes one line on standard error and exit code 2; a RunError, or a disk that is
    full or failing, one line and exit code 1. Any other exception keeps its traceback and becomes
    exit code 1.
    """
    quiet_tensorflow()
    try:
        code = body(arguments) or 0
    except UserError as error:
        _say(name, str(error), error)
        code = EXIT_USER_ERROR
    except RunError as error:
        code = EXIT_FAULT
        if error.on_all_ranks:
            _say(name, str(error))
        else:
            _report(name, error, str(error))
    except KeyboardInterrupt:
        _say(name, "interrupted")
        code = 130
    except Exception as error:
        code = EXIT_FAULT
        _report(name, error, _disk_problem(error))
    sys.stdout.flush()
    sys.stderr.flush()
    raise SystemExit(code)


def _report(name: str, error: Exception, line: str | None) -> None:
    """Prints a fault so that the rank whose fault it is speaks last and ends first.

    What ends first has the launcher end the others.

    Args:
      name: of the command.
      error: the fault.
      line: what to print instead of its traceback.
    """
    if "Horovod has been shut down" in str(error):
        rank = launched_rank()
        print(f"tfbig {name}: rank {rank} ends because another rank did.", file=sys.stderr)
        sys.stderr.flush()
        time.sleep(_FAILED_RANK_PATIENCE)
        return
    if int(os.environ.get("HOROVOD_SIZE", "1")) > 1:
        time.sleep(_OTHER_RANKS_NOTICE)
    if line is None:
        traceback.print_exception(error)
    else:
        where = f"rank {launched_rank()}: " if launched_rank() else ""
        print(f"tfbig {name}: error: {where}{' '.join(line.split())}", file=sys.stderr)


def _disk_problem(error: Exception) -> str | None:
    """Returns one line for a disk that is full, failing or read-only; None for other faults."""
    if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
        name, reason = error.filename or "to the disk", error.strerror
    elif type(error).__module__.startswith("tensorflow."):  # it writes TensorBoard's files itself
        reasons = "|".join(re.escape(os.strerror(number)) for number in _DISK_ERRORS)
        found = re.search(rf"(\S+); ({reasons})", str(error))
        if found is None:
            return None
        name, reason = found.groups()
    else:
        return None
    return (
        f"cannot write {name}: {reason}. What was saved before is intact: the same command goes on "
        "from there"
    )


def _say(name: str, text: str, error: UserError | None = None) -> None:
    """Prints an error as one line, once: by rank 0, or by a rank that fails alone.

    Args:
      name: of the command.
      text: the line.
      error: says whether the other ranks have met it too.
    """
    rank = launched_rank()
    where = f"rank {rank}: " if rank > 0 else ""
    if rank > 0:
        ended = any(name in os.environ for name in _LAUNCHERS)
        if ended:
            time.sleep(_OTHER_RANK_PATIENCE)  # rank 0 says the same, and the launcher ends this one
        if isinstance(error, SharedError):
            if not error.is_agreed and not ended:
                print(f"tfbig {name}: rank {rank} ends; rank 0, of the same flags, says why.")
            if error.is_agreed or not ended:
                return
    print(f"tfbig {name}: error: {where}{' '.join(text.split())}", file=sys.stderr, flush=True)
