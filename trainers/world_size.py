"""Whether as many ranks found each other as a launcher has started. TensorFlow-free."""

import os
from collections.abc import Mapping

from tfbig.command import SIZES
from tfbig.errors import UserError
from tfbig.together import on_every_rank


@on_every_rank(is_agreed=False)
def check_world_size(size: int, advice: str, environ: Mapping[str, str] = os.environ) -> None:
    """Checks that a rank's world is no smaller than what a launcher has started.

    It may be larger: TF_CONFIG can name processes that two launchers of one rank have started.

    Args:
      size: of the world.
      advice: what to do when it is.
      environ: the first of the launchers' variables that is set decides.

    Raises:
      SharedError: each of them would train alone, in the same folder.
    """
    for name in SIZES:
        started = environ.get(name, "")
        if not started.isdigit():
            continue
        if int(started) > size:
            raise UserError(
                f"{name}={started}, but this rank finds itself in a world of {size}: {advice}."
            )
        return
