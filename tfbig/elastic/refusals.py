"""What an elastic run cannot be, in one line each. TensorFlow-free."""

from collections.abc import Mapping

from tfbig.config import Config
from tfbig.errors import UserError
from tfbig.together import on_every_rank


@on_every_rank(is_agreed=False)
def check_elastic(config: Config, environ: Mapping[str, str]) -> None:
    """Checks that a run can go on in worlds of any size; trainers/validate.py checks its layout.

    Args:
      config: the run.
      environ: of this process, in which its launcher left what it is.

    Raises:
      UserError: the launcher starts a fixed number of ranks, or an option fixes their number.
    """
    if environ.get("HOROVOD_ELASTIC", "0") in ("", "0"):
        raise UserError(
            "--elastic needs a launcher that starts ranks while the run goes on: horovodrun with"
            " --min-np, --max-np and --host-discovery-script."
        )
    refused = {
        "--verify": config.run.verify,
        "--replay_step": config.robustness.replay_step,
        "--scale_learning_rate": config.optimizer.scale_learning_rate,
        "--gradient_reduction=tape": config.parallel.gradient_reduction == "tape",
    }
    for flag, is_given in refused.items():
        if is_given:
            raise UserError(
                f"{flag} does not go with --elastic, whose ranks and microbatches change in number:"
                " leave one of them out."
            )
