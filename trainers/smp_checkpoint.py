"""Checkpoints of a model that a script has cut: each stage writes its own."""

import os
from typing import Any

import keras
import tensorflow as tf

from tfbig.errors import UserError
from trainers.object_messages import gather_objects
from trainers.script_session import session


class CheckpointManager:
    """TensorFlow's manager, whose checkpoints hold what is on the stages, a folder for each.

    The partition is part of such a checkpoint and cannot change; the checkpoints of `tfbig train`
    resume on any layout.

    Args:
      checkpoint: a tf.train.Checkpoint of model and optimizer, and whatever else.
      directory: shared by all ranks.
      max_to_keep: of them, None keeps all.
      checkpoint_name: begins the files' names.
    """

    def __init__(
        self,
        checkpoint: tf.train.Checkpoint,
        directory: str = "/opt/ml/checkpoints",
        max_to_keep: int | None = None,
        checkpoint_name: str = "ckpt",
    ) -> None:
        self._places = session().mesh.coordinates(session().engine.rank)
        self._checkpoint, self._max_to_keep = checkpoint, max_to_keep
        self._name = checkpoint_name
        self.directory = os.path.join(directory, f"partition_{self._places['pipeline']}")
        self._manager: tf.train.CheckpointManager | None = None

    @property
    def checkpoints(self) -> list[str]:
        """Paths of this stage's checkpoints that are kept, the oldest first."""
        found = tf.train.get_checkpoint_state(self.directory)
        return list(found.all_model_checkpoint_paths) if found else []

    @property
    def latest_checkpoint(self) -> str | None:
        """Path of this stage's newest checkpoint, None without one."""
        return tf.train.latest_checkpoint(self.directory)

    def save(self, checkpoint_number: Any = None, **options: Any) -> str | None:
        """Saves, on every rank at once, and returns this stage's path.

        Args:
          checkpoint_number: by which it is named, the same on all ranks; None counts the saves.
          **options: of tf.train.CheckpointManager.save.
        """
        manager = self._of_variables()
        path = None
        if self._places["data"] == 0:
            path = manager.save(checkpoint_number, **options)
        else:
            manager.checkpoint.save_counter.assign_add(1)
        everyone = gather_objects(session().engine.world, path)  # waits until all are written
        return everyone[session().mesh.rank_at(**self._places | {"data": 0})]

    def restore(self) -> str | None:
        """Loads the newest checkpoint that all stages have; every rank calls it.

        Before the first step it belongs in a function under smp.register_post_partition_hook.

        Returns:
          The path, None where there is no checkpoint.

        Raises:
          UserError: the stages' checkpoints have no number in common, or the model isn't cut yet.
        """
        paths = {int(path.rpartition("-")[2]): path for path in self.checkpoints}
        everyone = gather_objects(session().engine.world, sorted(paths))
        if not any(everyone):
            return None
        common = set.intersection(*map(set, everyone))
        if not common:
            raise UserError(
                f"{os.path.dirname(self.directory)}: no checkpoint is there of every partition;"
                f" they have {everyone}."
            )
        path = paths[max(common)]
        self._of_variables().checkpoint.restore(path).assert_existing_objects_matched()
        return path

    def _of_variables(self) -> tf.train.CheckpointManager:
        """Returns a manager of what Keras' objects hold now.

        Keras 3 hands TensorFlow's checkpoints no layer that stands in a list, and so no block.
        """
        if self._manager is not None:
            return self._manager
        children = dict(self._checkpoint._trackable_children())
        children.pop("save_counter", None)
        models = [child for child in children.values() if isinstance(child, keras.Model)]
        if not all(model.variables for model in models):
            raise UserError(
                "a checkpoint needs the model's variables, which its first step makes: save behind"
                " it, restore behind it or under smp.register_post_partition_hook."
            )
        for child in children.values():
            if isinstance(child, keras.optimizers.Optimizer) and not child.built and models:
                child.build(models[0].trainable_variables)
        held = {name: _held(child) for name, child in children.items()}
        self._manager = tf.train.CheckpointManager(
            tf.train.Checkpoint(**held),
            self.directory,
            self._max_to_keep,
            checkpoint_name=self._name,
        )
        return self._manager


def _held(child: Any) -> Any:
    """Returns what a checkpoint takes of a Keras object: its variables, in order."""
    if not isinstance(child, (keras.layers.Layer, keras.optimizers.Optimizer)):
        return child
    # Numbers: Keras' automatic names change with what else a process builds.
    names = [f"variable_{index:05d}" for index in range(len(child.variables))]
    variables = [variable.value for variable in child.variables]
    return tf.train.Checkpoint(**dict(zip(names, variables, strict=True)))
