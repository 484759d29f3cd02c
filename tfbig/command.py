"""What every entry point shares: exit codes, one-line errors, a quiet start of TensorFlow."""

import os
import sys
import traceback
from collections.abc import Callable, Sequence

from tfbig.errors import UserError

EXIT_FAULT = 1  # ours or the machine's, with a traceback
EXIT_USER_ERROR = 2  # a user's mistake, one line
EXIT_SIGNAL = 143  # stopped by a signal after saving


def launched_rank() -> int:
    """Returns this process's rank as its launcher set it, 0 without one."""
    for name in ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return 0


def quiet_tensorflow() -> None:
    """Keeps TensorFlow's C++ start-up notices off the screen; call before importing it.

    A level that the user has set stays.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # errors still show
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")


def run_command(name: str, body: Callable[[Sequence[str]], int | None], arguments: Sequence[str]):
    """Runs an entry point's body and leaves the process with its exit code.

    Args:
      name: the command, e.g. "train", for messages.
      body: takes the arguments, returns an exit code or None for 0.
      arguments: what follows the command's name.

    A UserError becomes one line on standard error (on rank 0 alone) and exit code 2. Any other
    exception keeps its traceback and becomes exit code 1.
    """
    quiet_tensorflow()
    try:
        code = body(arguments) or 0
    except UserError as error:
        if launched_rank() == 0:
            print(f"tfbig {name}: error: {' '.join(str(error).split())}", file=sys.stderr)
        code = EXIT_USER_ERROR
    except KeyboardInterrupt:
        print(f"tfbig {name}: interrupted", file=sys.stderr)
        code = 130
    except Exception:
        traceback.print_exc()
        code = EXIT_FAULT
    sys.stdout.flush()
    sys.stderr.flush()
    raise SystemExit(code)
