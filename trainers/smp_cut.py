"""Which part of a script's model is on which stage."""

import contextlib
import random
from collections.abc import Iterator, Sequence
from typing import Any

import keras

from tfbig.errors import UserError

# A model's parts by the attributes that hold them: embedding, blocks, head.
NAMES = (("embedding_layer", "transformer_blocks", "dense"), ("embed", "blocks", "head"))


def part_names(model: keras.Model) -> tuple[str, str, str]:
    """Returns the attributes that hold the model's embedding, list of blocks and head.

    Raises:
      UserError: an attribute is missing.
    """
    names = max(NAMES, key=lambda names: sum(hasattr(model, name) for name in names))
    missing = [name for name in names if not hasattr(model, name)]
    if missing:
        raise UserError(
            f"{type(model).__name__} has no attribute {' and no '.join(missing)}: a model is cut"
            f" between its blocks, so it needs {', '.join(NAMES[0])} or {', '.join(NAMES[1])},"
            " of which the second is a list of layers."
        )
    if not isinstance(getattr(model, names[1]), (list, tuple)):
        raise UserError(f"{type(model).__name__}.{names[1]} must be a list of layers.")
    return names


class ModelCut:
    """A model cut between its blocks.

    Args:
      model: a script's.
      stage: of this rank.
      num_stages: p.
      by_hand: the stages of the blocks come from `placed` instead of being shared out evenly.
      default: stage of a block that is placed nowhere.

    Attributes:
      placed: the innermost stages that the script has named and not left, outermost first.
      own: this stage's variables, once known.
      seed: keys the initial values of layers that are built when they first run.
      example: specs of what the model was called with.

    Raises:
      UserError: no such parts, or fewer blocks than stages.
    """

    def __init__(
        self,
        model: keras.Model,
        stage: int,
        num_stages: int,
        by_hand: bool = False,
        default: int = 0,
        placed: Sequence[int] = (),
    ) -> None:
        self.names = part_names(model)
        self.num_blocks = len(getattr(model, self.names[1]))
        if self.num_blocks < num_stages:
            raise UserError(
                f"{num_stages} partitions need as many blocks, but {type(model).__name__} has"
                f" {self.num_blocks} in {self.names[1]}: take at most {self.num_blocks} partitions."
            )
        self.stage, self.num_stages = stage, num_stages
        self._by_hand, self._default, self.placed = by_hand, default, placed
        self._last_seen = 0
        self.own: list[keras.Variable] = []
        self.example: list[Any] = []
        self.seed = random.getrandbits(32)  # the same everywhere where the script sets Keras' seed

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1

    @property
    def anchor(self) -> keras.Variable:
        """A variable of this stage's own that is trained.

        Raises:
          UserError: there is none.
        """
        for variable in self.own:
            if variable.trainable:
                return variable
        raise UserError(f"stage {self.stage} has nothing to train: cut the model into fewer parts.")

    def stage_of(self, index: int) -> int:
        """Returns the stage of a block that is about to run; blocks run in order.

        Raises:
          UserError: the script places a block on an earlier stage than one before it.
        """
        if not self._by_hand:
            return index * self.num_stages // self.num_blocks
        stage = self.placed[-1] if self.placed else self._default
        if index == 0:
            self._last_seen = 0
        if stage not in (self._last_seen, self._last_seen + 1) or stage >= self.num_stages:
            raise UserError(
                f"smp.partition({stage}) around block {index}: blocks go to the stages 0 to"
                f" {self.num_stages - 1} in order, and the one before is on {self._last_seen}."
            )
        self._last_seen = stage
        return stage

    @contextlib.contextmanager
    def layers(self, model: keras.Model, trace: Any) -> Iterator[None]:
        """Puts layers in the place of the model's that ask `trace` what to do."""
        embed, blocks, _ = self.names
        plain = {name: model.__dict__[name] for name in (embed, blocks)}
        # Past Keras' __setattr__, which would take them for parts of the model.
        model.__dict__[embed] = _Embedding(plain[embed], trace, embed, self.stage)
        model.__dict__[blocks] = [
            _Block(layer, trace, index) for index, layer in enumerate(plain[blocks])
        ]
        try:
            yield
        finally:
            model.__dict__.update(plain)


class _Embedding:
    def __init__(self, layer: Any, trace: Any, name: str, stage: int) -> None:
        self._layer, self._trace, self._name, self._stage = layer, trace, name, stage

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._trace.embed(lambda: self._layer(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        if self._stage:
            raise UserError(
                f"the model uses {self._name}.{name} on stage {self._stage}, but {self._name} is on"
                " stage 0: a head that shares the embedding's weight cannot be cut off it here;"
                " --strategy=pipeline trains such models."
            )
        return getattr(self._layer, name)


class _Block:
    def __init__(self, layer: Any, trace: Any, index: int) -> None:
        self._layer, self._trace, self._index = layer, trace, index

    def __call__(self, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        run = lambda x: self._layer(x, *args, **kwargs)  # noqa: E731
        return self._trace.block(self._index, hidden, run)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)
