"""Whether degrees, microbatches and model fit together, with the arithmetic. TensorFlow-free."""

from tfbig.config import Config
from tfbig.errors import UserError
from tfbig.parallel_config import ParallelConfig
from tfbig.together import on_every_rank
from trainers.options import check_options_have_effect


def derive_microbatch_size(global_batch: int, num_replicas: int, microbatches: int) -> int:
    """Returns the sequences of one forward pass.

    Args:
      global_batch: sequences of an update over all ranks.
      num_replicas: copies of the model that share them.
      microbatches: forwards a replica and step.

    Raises:
      UserError: global_batch is no multiple of num_replicas x microbatches.

    >>> derive_microbatch_size(64, 4, 8)
    2
    """
    forwards = num_replicas * microbatches
    if global_batch % forwards:
        below = global_batch // forwards * forwards
        near = f"{below} or {below + forwards}" if below else str(forwards)
        raise UserError(
            f"--global_batch={global_batch} is no multiple of {num_replicas} replicas x"
            f" {microbatches} microbatches = {forwards}: take a global batch of {near}."
        )
    return global_batch // forwards


def num_chunks(config: Config) -> int:
    """Returns the parts of the model on each pipeline rank: 1 unless interleaved."""
    parallel = config.parallel
    interleaved = parallel.pipeline == "interleaved" and parallel.pipeline_parallel_degree > 1
    return parallel.num_chunks if interleaved else 1


@on_every_rank(is_agreed=False)
def check_data_parallel_only(config: Config) -> None:
    """Checks that a strategy which holds whole models isn't asked to cut one.

    Raises:
      UserError: a pipeline or tensor degree above 1, what one compiled function cannot do, or an
        option that has no effect.
    """
    parallel = config.parallel
    for name in ("pipeline_parallel_degree", "tensor_parallel_degree"):
        degree = getattr(parallel, name)
        if degree > 1:
            raise UserError(
                f"--strategy={parallel.strategy} is data parallel only, but --{name}={degree}: "
                "use --strategy=pipeline, which runs any mesh."
            )
    mode = parallel.activation_checkpointing
    if parallel.jit_compile and mode != "none" and parallel.sharding_level < 2:
        raise UserError(
            f"--jit_compile undoes --activation_checkpointing={mode} under --strategy="
            f"{parallel.strategy}: XLA merges the second forward pass with the first. Take"
            " --strategy=pipeline, which compiles them apart, or leave one of them out."
        )
    check_options_have_effect(config)


@on_every_rank(is_agreed=False)
def check_no_sharding(config: Config) -> None:
    """Checks that a strategy whose replicas share no state isn't asked to.

    Raises:
      UserError: a flag of ZeRO.
    """
    parallel = config.parallel
    if parallel.sharding_level:
        raise UserError(
            f"--strategy={parallel.strategy} keeps a copy of the optimizer's state on each device:"
            " --shard_optimizer_state needs --strategy=horovod or pipeline."
        )


@on_every_rank(is_agreed=False)
def check_not_elastic(config: Config) -> None:
    """Checks that a strategy whose ranks cannot be replaced isn't asked to.

    Raises:
      UserError: an elastic run.
    """
    if config.robustness.elastic:
        raise UserError(
            f"--elastic needs --strategy=horovod, where any rank can go on alone, not"
            f" {config.parallel.strategy}: start that one by `tfbig launch --restarts`, which goes"
            " on from the newest checkpoint."
        )


@on_every_rank(is_agreed=False)
def check_elastic_holds_all(config: Config) -> None:
    """Checks that each rank of an elastic run holds the whole state.

    Raises:
      UserError: a flag of ZeRO, by which a lost rank's share is lost.
    """
    level = config.parallel.sharding_level
    if config.robustness.elastic and level:
        flag = ("shard_optimizer_state", "shard_gradients", "shard_parameters")[level - 1]
        raise UserError(
            f"--elastic does not go with --{flag}: a lost rank's share of the state would be lost"
            " with it. Start the run by `tfbig launch --restarts`, which goes on from the newest"
            " checkpoint."
        )


@on_every_rank(is_agreed=False)
def check_one_device(config: Config) -> None:
    """Checks that a strategy with one device a process isn't asked to drive several.

    Raises:
      UserError: num_devices above 1.
    """
    parallel = config.parallel
    if parallel.num_devices > 1:
        raise UserError(
            f"--num_devices={parallel.num_devices}: a process of --strategy={parallel.strategy}"
            " drives one device: use --strategy=mirrored, or start more processes."
        )


def gradient_reduction(parallel: ParallelConfig) -> str:
    """Returns "tape" or "buckets", with "auto" resolved."""
    if parallel.gradient_reduction == "auto":
        return "tape" if parallel.microbatches == 1 and not parallel.jit_compile else "buckets"
    return parallel.gradient_reduction


@on_every_rank(is_agreed=False)
def check_gradient_reduction(config: Config) -> None:
    """Checks that Horovod's tape is asked for only where it can serve.

    Raises:
      UserError: it cannot.
    """
    parallel = config.parallel
    if parallel.gradient_reduction != "tape":
        return
    if parallel.sharding_level:
        raise UserError(
            "--gradient_reduction=tape gives every rank all gradients, where"
            " --shard_optimizer_state gives each its own part: leave it out."
        )
    if parallel.jit_compile:
        raise UserError(
            "--jit_compile with --gradient_reduction=tape would put Horovod inside a compiled"
            " function, where it cannot run: use buckets."
        )
    if parallel.microbatches > 1:
        raise UserError(
            f"--gradient_reduction=tape reduces once a backward pass, but --microbatches="
            f"{parallel.microbatches} makes {parallel.microbatches} of them a step: use buckets."
        )


@on_every_rank(is_agreed=False)
def check_mesh_fits(config: Config) -> None:
    """Checks that the model can be cut as the degrees ask.

    Raises:
      UserError: with the arithmetic, or an option that has no effect.
    """
    check_options_have_effect(config)
    _check_pipeline(config)
    _check_tensor(config)
    degree = config.parallel.pipeline_parallel_degree
    if config.parallel.sharding_level > 1 and degree > 1:
        raise UserError(
            "--shard_gradients and --shard_parameters need --pipeline_parallel_degree=1, not"
            f" {degree}: a pipeline adds up gradients over its microbatches, so take"
            " --shard_optimizer_state alone."
        )


def _check_pipeline(config: Config) -> None:
    parallel, layers = config.parallel, config.model.num_layers
    degree, chunks = parallel.pipeline_parallel_degree, num_chunks(config)
    if degree * chunks > layers:
        parts = f"{degree} stages" if chunks == 1 else f"{degree} ranks x {chunks} chunks"
        raise UserError(
            f"--pipeline_parallel_degree={degree}: {parts} need at least {degree * chunks} blocks,"
            f" but the model has {layers}: take at most {layers // chunks} stages."
        )


def _largest_divisor(number: int, limit: int) -> int:
    """Returns the largest divisor up to `limit`, or 1 where the search would be long.

    >>> _largest_divisor(12, 5)
    4
    """
    first = min(number, limit)
    return next((d for d in range(first, max(0, first - 10_000), -1) if number % d == 0), 1)


def _check_tensor(config: Config) -> None:
    model, degree = config.model, config.parallel.tensor_parallel_degree
    for name, length in (
        ("--num_heads", model.num_heads),
        ("--feed_forward_dim", model.hidden_dim),
    ):
        if length % degree:
            raise UserError(
                f"--tensor_parallel_degree={degree} does not divide {name}={length}"
                f" ({length} = {degree} x {length // degree} + {length % degree}): take"
                f" {_largest_divisor(length, degree)} or another size."
            )
    if config.parallel.jit_compile and degree > 1:
        raise UserError(
            f"--jit_compile cannot compile the collectives of --tensor_parallel_degree={degree}:"
            " leave one of them out."
        )
    length = config.data.sequence_length
    if config.parallel.sequence_parallel and length % degree:
        raise UserError(
            f"--sequence_parallel shares the {length} positions of a sample among"
            f" --tensor_parallel_degree={degree} ranks, which do not divide them"
            f" ({length} = {degree} x {length // degree} + {length % degree})."
        )
