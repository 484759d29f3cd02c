"""`--verify`: proves, before a run, that its layout trains the model that one device trains.

A shrunken copy of the model is trained for a few steps in the run's own layout, by the same code,
and again by `single` on rank 0. What both saw is compared: losses, the first step's gradients and
the weights after SGD, then the losses and gradient norms of the run's own optimizer, clipped. At
last the state is saved, changed, loaded and compared with what it was.

Plain SGD comes first because AdamW hardly changes when a gradient has a wrong scale, and without
clipping because that hides it too.
"""

import dataclasses
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import trainers
from tfbig.checkpoint_format import RunState, Slice, step_directory_name
from tfbig.checkpoint_reader import CheckpointReader
from tfbig.checkpoint_writer import CheckpointWriter
from tfbig.config import Config, replace_fields
from tfbig.loss_scale import multiplier_of_sum
from tfbig.parallel_config import ParallelConfig
from tfbig.run_folder import RunFolder
from tfbig.run_state import check_shared
from trainers.validate import num_chunks

STEPS = 3
TOLERANCE = 1e-5  # of float32
OPTIMIZER_TOLERANCE = 1e-4  # AdamW divides by roots of tiny numbers
NARROW_FACTOR = 2.0  # times the error that one device has in bfloat16 or float16
# What a number a step may err in any case: one rounding. One device can be luckier, as with a
# norm's 6e-5 in float16, where a sum over two ranks erred by 1.3e-4.
UNIT_ROUNDOFF = {"float16": 2.0**-11}
SAME_BITS_OR = 1e-6  # where the engine's sums differ from call to call
LENGTH, VOCABULARY, HEAD_DIM = 32, 211, 8
WAIT = 900.0  # seconds in which rank 0 trains `single`
NUM_SOURCES = 2

Tensors = dict[str, np.ndarray]


class VerificationError(RuntimeError):
    """The layout does not train what one device trains, or a resume changes the state."""


class Seen(NamedTuple):
    """What training showed, whole tensors on rank 0."""

    losses: np.ndarray  # (STEPS,)
    grad_norms: np.ndarray  # (STEPS,)
    gradients: Tensors  # of the first step, summed
    weights: Tensors  # after the last one


class Comparison(NamedTuple):
    """The largest relative error of one kind of number."""

    what: str
    where: str  # the variable, or the step
    error: float
    allowed: float

    @property
    def holds(self) -> bool:
        """Whether the error is a number within what is allowed."""
        return self.error <= self.allowed

    def line(self) -> str:
        """Returns it as a line to print."""
        sign = "<=" if self.holds else "EXCEEDS"
        return f"{self.what}: {self.error:.1e} {sign} {self.allowed:.1e} (largest: {self.where})"


def shrunken(config: Config) -> Config:
    """Returns the run's configuration with a model of a few thousand parameters.

    Layout, precision, kind of model, dropout and batch stay; width, depth, vocabulary and length
    go down as far as the layout lets them.
    """
    model, parallel = config.model, config.parallel
    degree = parallel.tensor_parallel_degree
    stages = max(1, parallel.pipeline_parallel_degree) * num_chunks(config)
    heads = min(model.num_heads, 2 * degree)
    length = min(model.max_length, config.data.sequence_length, LENGTH)
    small = {
        "num_heads": heads - heads % degree,
        "head_dim": 2 * HEAD_DIM if model.head_dim else 0,
        "embed_dim": HEAD_DIM * (heads - heads % degree),
        "feed_forward_dim": 4 * HEAD_DIM * degree if model.feed_forward_dim else 0,
        "num_layers": min(model.num_layers, max(2, stages)),
        "vocab_size": min(model.vocab_size, VOCABULARY),
        "max_length": length,
        "sequence_length": length - length % degree if parallel.sequence_parallel else length,
        "partition": "",
        "batch_warmup_start": 0,
        "batch_warmup_samples": 0,
        "layer_grad_norms": False,
        "schedule": "constant",
        "warmup_steps": 0,
    }
    return replace_fields(config, small)


def with_sgd(config: Config) -> Config:
    """Returns the configuration with plain SGD."""
    return replace_fields(config, {"optimizer": "sgd", "clip_norm": 0.0, "learning_rate": 0.1})


def clipped(config: Config) -> Config:
    """Returns the configuration with its own optimizer and a norm that clips every step."""
    return replace_fields(config, {"clip_norm": 0.05})


def on_one_device(config: Config, precision: Any) -> Config:
    """Returns the configuration for `single`, whose memory the whole batch must fit."""
    parallel = ParallelConfig(
        precision=precision,
        deterministic=config.parallel.deterministic,
        num_threads=config.parallel.num_threads,
    )
    return dataclasses.replace(config, parallel=parallel)


def make_batch(config: Config, step: int, data_rank: int, data_size: int) -> Mapping[str, Any]:
    """Returns one rank's part of a global batch of random tokens with padded rows.

    Args:
      config: shrunken.
      step: numbers the batch.
      data_rank: which part.
      data_size: of how many.
    """
    import tensorflow as tf

    rows, length = config.run.global_batch, config.data.sequence_length
    random = np.random.default_rng([config.run.seed, step])
    valid = random.integers(1, length + 1, (rows, 1))
    whole = {
        "tokens": random.integers(0, config.model.vocab_size, (rows, length + 1), np.int32),
        "sample_index": np.arange(rows, dtype=np.int64) + step * rows,
        "source_index": random.integers(0, NUM_SOURCES, rows).astype(np.int32),
        "loss_mask": (np.arange(length) < valid).astype(np.uint8),
    }
    own = slice(data_rank * rows // data_size, (data_rank + 1) * rows // data_size)
    return {name: tf.constant(value[own]) for name, value in whole.items()}


class Gatherer:
    """Collects the slices of all ranks into whole tensors, by a checkpoint's files.

    Args:
      folder: seen by all ranks.
      trainer: whose ranks give their slices.
    """

    def __init__(self, folder: Path, trainer: Any) -> None:
        self._folder, self._trainer, self._number = folder, trainer, 0
        self._writer = CheckpointWriter(folder, trainer.rank, trainer.size, 120.0)

    def save(self, slices: Iterable[Slice]) -> CheckpointReader:
        """Returns a reader of what all ranks gave; a collective call."""
        token = uuid.uuid4().int & (2**62 - 1)
        attempt = str(int(self._trainer.broadcast(np.array([token], np.int64))[0]))
        self._number += 1
        self._writer.save(self._number, slices, RunState(), attempt)
        self._writer.wait_until_complete(self._number, attempt)
        return CheckpointReader(self._folder / step_directory_name(self._number))

    def whole(self, slices: Iterable[Slice]) -> Tensors:
        """Returns whole tensors on rank 0, nothing on others; a collective call."""
        reader = self.save(slices)
        if self._trainer.rank:
            return {}
        return {path: reader.read(path) for path in reader.paths()}


def observe(trainer: Any, config: Config, gatherer: Gatherer) -> Seen:
    """Trains a built trainer for STEPS steps and returns what rank 0 saw."""
    place = trainer.data_rank, trainer.data_size
    scaled = gatherer.whole(trainer.gradient_slices(make_batch(config, 0, *place), 0))
    losses, norms, scales = [], [], []
    for step in range(STEPS):
        batch = make_batch(config, step, *place)
        result = trainer.train_step(batch, step, config.optimizer.learning_rate, 0.0, 0)
        losses.append(float(result.loss_sum) / float(result.num_tokens))
        norms.append(float(result.grad_norm))
        scales.append(float(result.loss_scale))
    # float16's, which no other precision's could be compared with while they are scaled.
    factor = multiplier_of_sum(config, scales[0])
    gradients = {path: value / factor for path, value in scaled.items()}
    weights = gatherer.whole(
        part for part in trainer.state_slices() if not part.path.startswith(("optimizer/", "ema/"))
    )
    return Seen(np.array(losses), np.array(norms), gradients, weights)


def largest_error(found: Tensors, expected: Tensors) -> tuple[float, str]:
    """Returns the largest relative error of a tensor, and its path.

    Relative to the tensor's norm, but at least to a thousandth of the largest one's, so that a
    gradient that is zero by nature doesn't count its rounding.
    """
    if not expected and not found:  # a stage whose variables are all frozen
        return 0.0, "no variable of rank 0's"
    norms = {path: float(np.linalg.norm(value)) for path, value in expected.items()}
    floor = 1e-3 * max(norms.values())
    errors = dict.fromkeys(set(norms) ^ set(found), np.inf)
    for path in norms.keys() & found.keys():
        distance = float(np.linalg.norm(found[path] - expected[path]))
        errors[path] = distance / max(norms[path], floor) if np.isfinite(distance) else np.inf
    path = max(errors, key=lambda name: errors[name])
    return errors[path], path


def largest_step_error(found: np.ndarray, expected: np.ndarray) -> tuple[float, str]:
    """Returns the largest relative error of a number a step, and the step."""
    errors = np.abs(found / expected - 1)
    errors = np.where(np.isfinite(errors), errors, np.inf)
    step = int(np.argmax(errors))
    return float(errors[step]), f"step {step}"


def compare(
    found: Seen, exact: Seen, narrow: Seen | None, plain: bool, precision: str
) -> list[Comparison]:
    """Compares what a layout saw with what one device saw.

    Args:
      found: of the layout.
      exact: of `single` in float32.
      narrow: of `single` in the run's own precision, where that isn't float32.
      plain: whether it was SGD without clipping, whose gradients and weights are compared.
      precision: the run's.
    """
    base = TOLERANCE if plain else OPTIMIZER_TOLERANCE
    of_steps = max(base, UNIT_ROUNDOFF.get(precision, 0.0))

    def one(
        what: str, error: Callable[[Seen], tuple[float, str]], base: float = base
    ) -> Comparison:
        value, where = error(found)
        allowed = base if narrow is None else max(base, NARROW_FACTOR * error(narrow)[0])
        return Comparison(what, where, value, allowed)

    comparisons = [
        one("losses", lambda seen: largest_step_error(seen.losses, exact.losses), of_steps)
    ]
    if plain:
        comparisons += [
            one("gradients", lambda seen: largest_error(seen.gradients, exact.gradients)),
            one("weights after SGD", lambda seen: largest_error(seen.weights, exact.weights)),
        ]
    norms = one(
        "gradient norms",
        lambda seen: largest_step_error(seen.grad_norms, exact.grad_norms),
        of_steps,
    )
    comparisons.append(norms)
    return comparisons


def check_resume(trainer: Any, config: Config, gatherer: Gatherer) -> list[Comparison]:
    """Saves, trains on and loads; compares the next loss and gradient with those before.

    Collective; the same bits are asked for where the engine gives them twice.
    """
    batch = make_batch(config, STEPS, trainer.data_rank, trainer.data_size)

    def losses() -> Tensors:
        return {"validation": trainer.evaluate_step(batch)[0]}  # (global batch,)

    def gradient() -> Tensors:
        slices = trainer.gradient_slices(batch, STEPS)
        return {f"{part.path}{part.start}": np.array(part.array) for part in slices}

    numbers = {"loss": losses, "gradient": gradient}
    before, again = ({name: make() for name, make in numbers.items()} for _ in range(2))
    reader = gatherer.save(trainer.state_slices())
    trainer.train_step(batch, STEPS, config.optimizer.learning_rate, 0.0, 0)
    trainer.load_state(reader)
    comparisons = []
    for name, make in numbers.items():
        old, twice = before[name], again[name]
        repeats = all(np.array_equal(old[key], twice[key]) for key in old)
        repeats = bool(trainer.agree(int(repeats), "min"))
        error, where = largest_error(make(), old)
        error = trainer.agree(int(min(error, 1.0) * 1e12), "max") / 1e12
        what = f"next {name} after save and load"
        comparisons.append(Comparison(what, where, error, 0.0 if repeats else SAME_BITS_OR))
    return comparisons


def verify(
    config: Config,
    prepare: Callable[[Any], None] = lambda trainer: None,
    check: Callable[[Any], None] = lambda trainer: None,
) -> list[Comparison]:
    """Compares the run's layout with `single`; every rank calls it before the run's own trainer.

    Args:
      config: of the run, valid.
      prepare: called with each trainer of the layout once it is built.
      check: called on every rank with the layout's first trainer, which has no variables yet: what
        the run is to be refused for, before anything is trained.

    Returns:
      What was compared, all of it within what is allowed; empty on other ranks than 0.

    Raises:
      UserError: on every rank, when the ranks share no folder, or of `check`.
      VerificationError: on every rank, naming the largest error and its variable.
    """
    small, comparisons = shrunken(config), []
    folder = RunFolder(config.run.run_dir).verify_dir
    for plain, variant in ((True, with_sgd(small)), (False, clipped(small))):
        trainer = trainers.start(variant)
        try:
            if plain:
                check(trainer)
                _make_shared(folder, trainer)
            trainer.build(True, NUM_SOURCES)
            prepare(trainer)
            gatherer = Gatherer(folder / ("sgd" if plain else "own"), trainer)
            found = observe(trainer, variant, gatherer)
            if trainer.rank == 0:
                seen = _references(variant, folder)
                comparisons += compare(found, *seen, plain, config.parallel.precision)
            trainer.barrier(WAIT)
            if plain:
                resumed = check_resume(trainer, variant, gatherer)
                comparisons += resumed if trainer.rank == 0 else []
            failed = trainer.agree(sum(not one.holds for one in comparisons), "max")
            trainer.barrier(WAIT)
        finally:
            trainer.close()
            if trainer.rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
        if failed:
            lines = "; ".join(one.line() for one in comparisons if not one.holds)
            raise VerificationError(
                f"this layout does not train what one device trains: {lines or 'see rank 0'}"
            )
    return comparisons


def _make_shared(folder: Path, trainer: Any) -> None:
    """Makes the folder in which the ranks hand over tensors; each must see what rank 0 makes."""
    if trainer.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
    check_shared(RunFolder(folder), trainer)


def _references(variant: Config, folder: Path) -> tuple[Seen, Seen | None]:
    """Returns what `single` sees in float32 and, where it isn't that, in the run's precision."""
    seen = []
    for precision in dict.fromkeys(("float32", variant.parallel.precision)):
        config = on_one_device(variant, precision)
        trainer = trainers.trainer_class("single")(config)
        trainer.build(True, NUM_SOURCES)
        seen.append(observe(trainer, config, Gatherer(folder / f"single_{precision}", trainer)))
        trainer.close()
    return seen[0], seen[1] if len(seen) > 1 else None
