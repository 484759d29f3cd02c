"""A timed trial at a run's start: the form of attention that is fastest on its device."""

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfbig.batches import filled_up, slice_of
from tfbig.config import Config, replace_fields
from tfbig.errors import UserError
from tfbig.model.attention_form import FORMS, AttentionForm
from tfbig.model.dropout import sample_keys
from tfbig.planner.at_start import fits, memory_there, overhead_of
from tfbig.run_folder import RunFolder
from tfbig.together import together
from tfbig.variables import part_of

REPEATS = 5
# What the plain form's scores may take: samples beyond it are left out of the trial, and the plain
# forms are if a single sample's do not fit in four times as much. It holds a few such tensors.
MAX_SCORES_BYTES = 256 << 20

Attend = Callable[[tf.Tensor, tf.Tensor, tf.Tensor], tf.Tensor]


@dataclass(frozen=True)
class Shape:
    """What attention is tried on: queries, keys and values (rows, length, heads, head_dim)."""

    rows: int
    length: int
    heads: int
    head_dim: int
    dtype: str

    @classmethod
    def of(cls, config: Config, trainer: Any) -> "Shape":
        """Returns a rank's share of a run's attention, with fewer rows where scores are large."""
        parallel, model = config.parallel, config.model
        length = config.data.sequence_length
        heads = part_of(model.num_heads, parallel.tensor_parallel_degree, 0)[1]
        rows = slice_of(config, trainer) // parallel.microbatches
        # One process of several replicas cuts its slice once more.
        rows = -(-rows * trainer.data_size // trainer.num_replicas)
        shape = cls(rows, length, heads, model.attention_head_dim, parallel.precision)
        rows = MAX_SCORES_BYTES * rows // shape.scores_bytes
        return dataclasses.replace(shape, rows=max(1, min(shape.rows, rows)))

    @property
    def scores_bytes(self) -> int:
        """Of the plain form's scores, float32."""
        return 4 * self.rows * self.heads * self.length**2

    def __str__(self) -> str:
        return (
            f"{self.rows} x {self.length} positions, {self.heads} heads of {self.head_dim}, "
            f"{self.dtype}"
        )


@dataclass(frozen=True)
class Choice:
    """What a run attends with.

    Attributes:
      config: of the run, with the form that was chosen in place of "auto".
      reason: of the choice, in words; "" where there was none to make or on other ranks than 0.
      seconds: of a forward and backward pass, by form.
    """

    config: Config
    reason: str = ""
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def notes(self) -> list[str]:
        """Lines to print."""
        return [f"attention: {self.reason}"] if self.reason else []

    def write(self, folder: RunFolder) -> None:
        """Appends the choice to the run's events."""
        if self.reason:
            with contextlib.closing(folder.open_events()) as events:
                form = self.config.parallel.attention
                events.write_event("attention", self.reason, form=form, seconds=self.seconds)


def choose_attention(config: Config, trainer: Any, device_bytes: int) -> Choice:
    """Returns the run with the form that rank 0 found fastest; all ranks call it, before `build`.

    The trainer is told, too. Where --attention names a form, where a rank has no GPU, and with
    --deterministic, as times differ from run to run, nothing is tried.

    Args:
      config: of the run.
      trainer: its engine has started, and it has made no variable.
      device_bytes: of this process's GPU; 0 means that it has none.
    """
    parallel = config.parallel
    if parallel.attention != "auto" or parallel.deterministic:
        return Choice(config)
    if not trainer.agree(int(device_bytes > 0), "min"):
        return Choice(config)
    there, overhead = memory_there(trainer, device_bytes), overhead_of(device_bytes)
    choice = Choice(config)

    def choose() -> int:
        nonlocal choice
        if trainer.rank:
            return 0
        if config.robustness.replay_step:
            choice = recorded(config)
        else:
            run = filled_up(config, trainer)
            choice = tried(
                config,
                Shape.of(config, trainer),
                lambda form: fits(_with(run, form), trainer, there, overhead),
            )
        return ("auto", *FORMS).index(choice.config.parallel.attention)

    number = trainer.agree(together(trainer, choose), "max")
    if number:
        trainer.set_attention(FORMS[number - 1])
        config = replace_fields(config, {"attention": FORMS[number - 1]})
    return dataclasses.replace(choice, config=config)


def recorded(config: Config) -> Choice:
    """Returns what the run that is replayed attended with."""
    try:
        record = RunFolder(config.run.run_dir).read_config()
    except UserError:  # a folder without one is told of where its checkpoint is looked for
        return Choice(config)
    form = record["config"]["parallel"].get("attention", "auto")
    return Choice(replace_fields(config, {"attention": form}), f"{form}, as the run had it")


def tried(config: Config, shape: Shape, fits_with: Callable[[str], bool]) -> Choice:
    """Returns the run with the fastest form that fits into memory, or "auto" if none ran.

    Args:
      config: of the run.
      shape: what forms are tried on.
      fits_with: whether the run with a form fits.
    """
    forms = candidates(config, shape)
    seconds, failures = time_forms(forms, shape, config.parallel.jit_compile)
    _forget_peak()
    ranking = sorted(seconds, key=lambda name: seconds[name])
    fitting = [name for name in ranking if fits_with(name)]
    form = (fitting or ranking or ["auto"])[0]
    found = [f"{name} {1000 * seconds[name]:.3g} ms" for name in ranking]
    found += [f"{name} failed ({why})" for name, why in failures.items()]
    if fitting and fitting != ranking:
        found.append(f"{', '.join(name for name in ranking if name not in fitting)}: too large")
    if not any(name.startswith("plain") for name in forms):
        found.append("plain forms not tried: a sample's scores are too large")
    reason = f"{form}, by a trial of {shape}, forward and backward: {'; '.join(found)}"
    return Choice(_with(config, form), reason, {name: seconds[name] for name in ranking})


def _with(config: Config, form: str) -> Config:
    return replace_fields(config, {"attention": form})


def candidates(config: Config, shape: Shape) -> dict[str, Attend]:
    """Returns the forms that a run could take, by name, ready to call.

    Under --jit_compile those without "_xla" are compiled already.
    """
    names = [name for name in FORMS if not (config.parallel.jit_compile and name.endswith("_xla"))]
    if shape.scores_bytes > 4 * MAX_SCORES_BYTES:
        names = [name for name in names if not name.startswith("plain")]
    rate = config.model.attention_dropout
    recomputes = config.parallel.activation_checkpointing == "attention"
    keys = None
    if rate > 0:
        index = tf.range(shape.rows, dtype=tf.int64)
        keys = sample_keys(config.run.seed, tf.constant(0, tf.int64), 0, 0, index)

    def ready(name: str) -> Attend:
        form = AttentionForm(name, rate, recomputes=recomputes)
        return lambda query, key, value: form(query, key, value, None, keys)

    return {name: ready(name) for name in names}


def time_forms(
    forms: Mapping[str, Attend], shape: Shape, jit_compile: bool = False, repeats: int = REPEATS
) -> tuple[dict[str, float], dict[str, str]]:
    """Returns each form's seconds, the median of a few turns, and why others failed.

    Args:
      forms: by name.
      shape: of the tensors.
      jit_compile: whether XLA compiles the two passes.
      repeats: turns that count, after one that compiles.
    """
    sizes = (shape.rows, shape.length, shape.heads, shape.head_dim)
    tensors = [
        tf.cast(tf.random.stateless_normal(sizes, [0, index]), shape.dtype) for index in range(4)
    ]
    runs = {name: _passes(attend, jit_compile) for name, attend in forms.items()}
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    failures: dict[str, str] = {}
    for turn in range(1 + repeats):
        for name, run in runs.items():
            if name in failures:
                continue
            start = time.perf_counter()
            try:
                run(*tensors)[0].numpy()  # waits for the device
            except tf.errors.OpError as error:  # too little memory, or nothing that XLA can compile
                failures[name] = f"{type(error).__name__}: {error.message.splitlines()[0][:120]}"
                continue
            if turn:
                seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(all_) for name, all_ in seconds.items() if all_}
    return {name: medians[name] for name in medians if name not in failures}, failures


def _passes(attend: Attend, jit_compile: bool) -> Callable[..., list[tf.Tensor]]:
    """Returns a function of query, key, value and the output's gradient that gives theirs.

    The first of its results is small and made of all others.
    """

    def run(
        query: tf.Tensor, key: tf.Tensor, value: tf.Tensor, upstream: tf.Tensor
    ) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch([query, key, value])
            output = attend(query, key, value)
        gradients = tape.gradient(output, [query, key, value], output_gradients=upstream)
        return [tf.stack([gradient[0, 0, 0, 0] for gradient in gradients]), *gradients]

    return tf.function(run, autograph=False, jit_compile=jit_compile or None)


def _forget_peak() -> None:
    """Has the run's own peak of memory measured anew."""
    for device in tf.config.list_logical_devices("GPU"):
        tf.config.experimental.reset_memory_stats(device.name.replace("/device:", ""))
