"""Which strategies an option has an effect on. TensorFlow-free."""

from tfbig.config import Config
from tfbig.errors import UserError
from tfbig.parallel_config import ParallelConfig

# Options that any strategy takes are not listed.
STRATEGIES_OF = {
    "placement_strategy": ("pipeline",),
    "pipeline": ("pipeline",),
    "num_chunks": ("pipeline",),
    "active_microbatches": ("pipeline",),
    "memory_weight": ("pipeline",),
    "partition": ("pipeline",),
    "sequence_parallel": ("pipeline",),
    "gradient_reduction": ("horovod",),
    "bucket_megabytes": ("horovod", "pipeline"),
}


def check_options_have_effect(config: Config) -> None:
    """Checks that no option is set that the strategy does not look at.

    Raises:
      UserError: an option of other strategies differs from its default.
    """
    parallel, defaults = config.parallel, ParallelConfig()
    for name, strategies in STRATEGIES_OF.items():
        value = getattr(parallel, name)
        if parallel.strategy not in strategies and value != getattr(defaults, name):
            shown = f"--{name}" if value is True else f"--{name}={value}"
            raise UserError(
                f"{shown} has no effect with --strategy={parallel.strategy}: it is for "
                f"--strategy={' and --strategy='.join(strategies)}; leave it out."
            )
