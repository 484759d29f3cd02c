"""What a configuration must satisfy, each rule with the arithmetic that breaks it. TF-free."""

import dataclasses
import math
from collections.abc import Iterator

from tfbig.config import Config, ModelConfig, OptimizerConfig, RunConfig
from tfbig.errors import UserError, near_matches
from tfbig.loss_config import loss_problems
from tfbig.number_rules import as_float32, float32_problems, integer_problems, way_out
from tfbig.parallel_config import ParallelConfig
from tfbig.profile_config import profile_problems
from tfbig.recomputation_mode import group_size
from tfbig.recomputation_mode import problem as recomputation_problem
from tfbig.robustness_config import robustness_problems
from tfbig.together import on_every_rank
from tfbig.variables import is_trained, variable_specs

_MAX_SEED = 2**31 - 1
_MOST_OF_A_PROCESS = 4096  # threads, devices, readers: more is a slip of the keyboard
_MAX_LAYERS_LISTED = 10_000  # beyond, the table of variables is not made for a check


@on_every_rank(is_agreed=False)
def validate(config: Config) -> None:
    """Checks everything that needs neither the data nor other processes.

    Raises:
      UserError: the first rule that is broken: field, value, rule and a way out.
    """
    for problem in problems(config):
        raise UserError(problem)


def problems(config: Config) -> Iterator[str]:
    """Yields one line for each rule that `config` breaks."""
    for item in dataclasses.fields(config):
        yield from integer_problems(getattr(config, item.name))
    for section in (config.model, config.optimizer, config.loss):
        yield from float32_problems(section)
    yield from _model_problems(config.model)
    yield from _optimizer_problems(config.optimizer)
    yield from _run_problems(config.run)
    yield from _parallel_problems(config.parallel)
    yield from profile_problems(config.profile)
    yield from _adapter_problems(config)
    yield from robustness_problems(config.robustness)
    yield from loss_problems(config.loss)
    yield from _within(config.data, 1, _MOST_OF_A_PROCESS, "data_workers")
    length, positions = config.data.sequence_length, config.model.max_length
    if length < 1:
        yield (
            f"--sequence_length={length}: a sample feeds at least 1 token; "
            f"{way_out(config.data, 'sequence_length')}"
        )
    elif length > positions:
        yield (
            f"--sequence_length={length} is longer than the model's {positions} positions: "
            f"shorten the samples or pass --max_length={length}."
        )


def _at_least(section: object, minimum: float, *names: str) -> Iterator[str]:
    for name in names:
        value = getattr(section, name)
        if not minimum <= value < math.inf:
            finite = " and finite" if value == math.inf else ""
            yield f"--{name}={value} must be at least {minimum:g}{finite}: {way_out(section, name)}"


def _between(section: object, low: float, high: float, *names: str) -> Iterator[str]:
    """Yields a line for each field outside [low, high), in float32."""
    for name in names:
        value = getattr(section, name)
        if not low <= as_float32(value) < high:
            yield (
                f"--{name}={value} must be at least {low:g} and below {high:g}, in float32 too: "
                f"{way_out(section, name)}"
            )


def _within(section: object, low: int, high: int, *names: str) -> Iterator[str]:
    for name in names:
        value = getattr(section, name)
        if not low <= value <= high:
            yield (
                f"--{name}={value} must be at least {low} and at most {high}: "
                f"{way_out(section, name)}"
            )


def _model_problems(model: ModelConfig) -> Iterator[str]:
    yield from _at_least(
        model, 1, "vocab_size", "max_length", "embed_dim", "num_layers", "num_heads"
    )
    yield from _at_least(model, 0, "head_dim", "feed_forward_dim", "init_std", "residual_init_std")
    yield from _between(model, 0, 1, "dropout", "attention_dropout", "embedding_dropout")
    if not 0 < model.norm_epsilon < math.inf:
        yield (
            f"--norm_epsilon={model.norm_epsilon} must be above 0 and finite: "
            f"{way_out(model, 'norm_epsilon')}"
        )
    heads, width = model.num_heads, model.embed_dim
    if model.head_dim == 0 and heads >= 1 and width % heads != 0:
        yield (
            f"--num_heads={heads} does not divide --embed_dim={width} ({width} = "
            f"{heads} x {width // heads} + {width % heads}): take {_near_divisor(width, heads)} "
            "heads, or give --head_dim."
        )
    yield from _position_problems(model)
    if model.parallel_residual and model.norm_order == "post":
        yield (
            "--parallel_residual needs --norm_order=pre, as its sublayers share one residual sum: "
            "pass that, or leave it out."
        )
    if model.tied_head and model.head_bias:
        yield "--head_bias needs an untied head: add --notied_head."


def _adapter_problems(config: Config) -> Iterator[str]:
    model, freeze = config.model, config.optimizer.freeze
    if model.lora_rank < 0:
        yield f"--lora_rank={model.lora_rank} must be at least 0: {way_out(model, 'lora_rank')}"
        return
    if not 0 < model.lora_alpha < math.inf:
        yield (
            f"--lora_alpha={model.lora_alpha} must be above 0 and finite: "
            f"{way_out(model, 'lora_alpha')}"
        )
    if not freeze or model.num_heads < 1 or not 1 <= model.num_layers <= _MAX_LAYERS_LISTED:
        return
    paths = [spec.path for spec in variable_specs(model)]
    without = dataclasses.replace(model, lora_rank=0)
    for pattern in freeze:
        if all(is_trained(path, without, [pattern]) for path in paths):
            yield (
                f"--freeze={pattern} matches no variable.{near_matches(pattern, paths)}"
                f" The first is {paths[0]}: give a pattern of such names."
            )
    if not any(is_trained(path, model, freeze) for path in paths):
        yield "--freeze leaves nothing to train: give fewer patterns."


def _near_divisor(number: int, wanted: int) -> int:
    """Returns the divisor of `number` that is nearest to `wanted`, looking not too far.

    >>> _near_divisor(128, 12)
    16
    """
    for distance in range(1, 10_000):
        for candidate in (wanted - distance, wanted + distance):
            if 0 < candidate <= number and number % candidate == 0:
                return candidate
    return 1


def _position_problems(model: ModelConfig) -> Iterator[str]:
    if not 0 < model.rotary_fraction <= 1:
        yield (
            f"--rotary_fraction={model.rotary_fraction} must be above 0 and at most 1: "
            f"{way_out(model, 'rotary_fraction')}"
        )
    if not 1 < model.rotary_base < math.inf:
        yield (
            f"--rotary_base={model.rotary_base} must be above 1 and finite: "
            f"{way_out(model, 'rotary_base')}"
        )
    sizes_known = model.num_heads >= 1 and 0 < model.rotary_fraction <= 1
    if sizes_known and model.position_embedding == "rotary" and model.rotary_dim < 2:
        yield (
            f"--rotary_fraction={model.rotary_fraction} turns {model.rotary_dim} of the "
            f"{model.attention_head_dim} dims of a head: at least 2 are needed; "
            "take a larger share."
        )


def _optimizer_problems(optimizer: OptimizerConfig) -> Iterator[str]:
    yield from _at_least(
        optimizer, 0, "learning_rate", "weight_decay", "clip_norm", "warmup_steps", "decay_steps"
    )
    yield from _between(optimizer, 0, 1, "beta1", "beta2", "ema_decay")
    yield from _at_least(optimizer, 1, "loss_scale_growth_steps")
    if not 2.0**-24 <= optimizer.initial_loss_scale <= 2.0**24:
        yield (
            f"--initial_loss_scale={optimizer.initial_loss_scale} must lie between 2^-24 and 2^24: "
            f"{way_out(optimizer, 'initial_loss_scale')}"
        )
    if not 0 < optimizer.epsilon < math.inf:
        yield (
            f"--epsilon={optimizer.epsilon} must be above 0 and finite: "
            f"{way_out(optimizer, 'epsilon')}"
        )
    if not 0 <= optimizer.learning_rate_floor <= 1:
        yield (
            f"--learning_rate_floor={optimizer.learning_rate_floor} is a fraction of the peak, "
            f"between 0 and 1: {way_out(optimizer, 'learning_rate_floor')}"
        )
    if optimizer.schedule != "constant" and optimizer.decay_steps < optimizer.warmup_steps:
        yield (
            f"--decay_steps={optimizer.decay_steps} ends before --warmup_steps="
            f"{optimizer.warmup_steps}: decay later or warm up for less."
        )


def _run_problems(run: RunConfig) -> Iterator[str]:
    yield from _at_least(run, 1, "steps", "global_batch", "keep_last", "log_every")
    yield from _at_least(
        run,
        0,
        "eval_every",
        "checkpoint_every",
        "max_loss",
        "batch_warmup_start",
        "batch_warmup_samples",
    )
    start = run.batch_warmup_start
    if start > 0 and run.global_batch % start:
        yield (
            f"--batch_warmup_start={start} does not divide --global_batch={run.global_batch} "
            f"({run.global_batch} = {start} x {run.global_batch // start} + "
            f"{run.global_batch % start}): it grows by whole multiples of its start; take "
            f"{_near_divisor(run.global_batch, start)}."
        )
    if (start > 0) != (run.batch_warmup_samples > 0):
        yield "--batch_warmup_start and --batch_warmup_samples go together: give both or neither."
    if run.steps * run.global_batch >= 2**63 > max(run.steps, run.global_batch):
        yield (
            f"--steps={run.steps} x --global_batch={run.global_batch} are "
            f"{run.steps * run.global_batch:.3g} samples, beyond 64 bits: take fewer steps."
        )
    if not 0 <= run.seed <= _MAX_SEED:
        yield f"--seed={run.seed} must lie between 0 and {_MAX_SEED}: {way_out(run, 'seed')}"


def _parallel_problems(parallel: ParallelConfig) -> Iterator[str]:
    yield from _at_least(
        parallel,
        1,
        "microbatches",
        "pipeline_parallel_degree",
        "tensor_parallel_degree",
        "bucket_megabytes",
    )
    yield from _within(parallel, 0, _MOST_OF_A_PROCESS, "num_threads", "num_devices")
    yield from _at_least(parallel, 0, "active_microbatches")
    yield from _at_least(parallel, 1, "num_chunks")
    if not 0 <= parallel.memory_weight <= 1:
        yield (
            f"--memory_weight={parallel.memory_weight} must lie between 0 (balance computation) "
            f"and 1 (balance memory): {way_out(parallel, 'memory_weight')}"
        )
    if parallel.offload_optimizer_state and not parallel.sharding_level:
        yield (
            "--offload_optimizer_state needs --shard_optimizer_state, whose update it moves to the"
            " host, with one process too: add it."
        )
    mode = parallel.activation_checkpointing
    if problem := recomputation_problem(mode):
        yield problem
    elif parallel.offload_activations and group_size(mode) == 0:
        yield (
            f"--offload_activations moves the inputs of checkpointed blocks, but"
            f" --activation_checkpointing={mode} keeps more than these: add"
            " --activation_checkpointing=block."
        )
    if parallel.offload_activations and parallel.jit_compile:
        yield "--offload_activations moves tensors out of what --jit_compile compiles: take one."
    yield from _at_least(parallel, 0, "activation_loading_horizon")
