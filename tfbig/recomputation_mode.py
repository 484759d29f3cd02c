"""The words of --activation_checkpointing. TensorFlow-free."""

import re

from tfbig.errors import UserError

WORDS = "none, block, group_N (N blocks, e.g. group_2) or attention"


def problem(mode: str) -> str | None:
    """Says why a mode is none, or returns None.

    >>> problem("group_0")
    '--activation_checkpointing=group_0 is no mode: give none, block, ...'
    """
    if mode in ("none", "block", "attention") or re.fullmatch(r"group_[1-9]\d{0,5}", mode):
        return None
    return f"--activation_checkpointing={mode} is no mode: give {WORDS}."


def group_size(mode: str) -> int:
    """Returns how many consecutive blocks keep one input; 0 where each block keeps all.

    Raises:
      UserError: there is no such mode.

    >>> group_size("group_3"), group_size("block"), group_size("attention")
    (3, 1, 0)
    """
    if unknown := problem(mode):
        raise UserError(unknown)
    return 1 if mode == "block" else int(mode[6:]) if mode.startswith("group_") else 0
