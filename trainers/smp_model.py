"""The model of a script that is cut over the ranks."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfbig.errors import UserError
from trainers.object_messages import broadcast_object_in
from trainers.script_session import session
from trainers.smp_cut import ModelCut


class DistributedModel(keras.Model):
    """A Keras model for scripts to subclass, which `smp.step` cuts between its blocks.

    A subclass has the attributes `embedding_layer`, `transformer_blocks` (a list) and `dense`, or
    `embed`, `blocks` and `head`, and a `call` that runs the blocks in order. Layers that make
    their variables when they first run, as Keras' do, make them on their stage alone. Once the
    model is cut, `variables` and `trainable_variables` are this rank's.
    """

    @property
    def smp_cut(self) -> ModelCut:
        """Which blocks are on which stage."""
        if "_smp_cut" not in self.__dict__:
            parameters, shared = session().parameters, session()
            if parameters is None:
                raise UserError("call smp.init() before a DistributedModel runs.")
            place = shared.mesh.coordinates(shared.engine.rank)["pipeline"]
            by_hand = not parameters.auto_partition
            # Past Keras' __setattr__, which would look for layers in it.
            self.__dict__["_smp_cut"] = ModelCut(
                self,
                place,
                parameters.partitions,
                by_hand,
                parameters.default_partition or 0,
                shared.placed,
            )
        return self.__dict__["_smp_cut"]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        trace = session().trace
        if trace is None:
            raise UserError("a DistributedModel can be called inside a function of smp.step only.")
        self.built = True  # its layers are built as they run
        return trace.run_model(self, args, kwargs)

    def _own(self, variables: Sequence[keras.Variable]) -> list[keras.Variable]:
        cut = self.__dict__.get("_smp_cut")
        if cut is None or not cut.own:
            return list(variables)
        own = {id(variable) for variable in cut.own}
        return [variable for variable in variables if id(variable) in own]

    @property
    def variables(self) -> list[keras.Variable]:
        return self._own(super().variables)

    @property
    def trainable_variables(self) -> list[keras.Variable]:
        return self._own(super().trainable_variables)

    @property
    def non_trainable_variables(self) -> list[keras.Variable]:
        return self._own(super().non_trainable_variables)

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: a model cut over ranks is trained by a step of the script's."""
        raise UserError(
            "DistributedModel.fit isn't served: write the step with @smp.step, or train by"
            " `tfbig train --strategy=pipeline`."
        )

    def save_model(self, save_path: str = "/opt/ml/model") -> None:
        """Writes the whole model as a SavedModel, from rank 0; every rank calls it.

        Rank 0's host holds the whole model then, layers of other stages included.

        Args:
          save_path: a folder.

        Raises:
          UserError: no step has run yet, so that shapes aren't known.
        """
        cut = self.smp_cut
        if not cut.own:
            raise UserError("save_model: run a step first, which makes the model's variables.")
        group, engine = session().line("pipeline"), session().engine
        if session().mesh.coordinates(engine.rank)["data"] == 0:
            self._gather(cut, group)
            if engine.rank == 0:
                self._save(cut, save_path)
        engine.agree(0, "max")  # without a limit: rank 0 writes as long as it takes

    def _gather(self, cut: ModelCut, group: Any) -> None:
        """Gives the first stage the values of all others' variables."""
        by_path = {variable.path: variable for variable in super().variables}
        if group.rank == 0 and group.size > 1:
            keras.Model.__call__(
                self, *(tf.zeros(x.shape, x.dtype) for x in cut.example)
            )  # builds the layers of other stages
            by_path = {variable.path: variable for variable in super().variables}
        for stage in range(1, group.size):
            names = [variable.path for variable in cut.own] if group.rank == stage else None
            for path in broadcast_object_in(group, names, stage):
                value = by_path[path].numpy() if group.rank == stage else None
                value = broadcast_object_in(group, value, stage)
                if group.rank == 0:
                    by_path[path].assign(value)

    def _save(self, cut: ModelCut, save_path: str) -> None:
        inputs, training = cut.example[0], {"training": False}
        takes_training = "training" in self._call_spec()
        options = training if takes_training else {}

        @tf.function(
            input_signature=[tf.TensorSpec([None, *inputs.shape[1:]], inputs.dtype)],
            autograph=False,
        )
        def serve(inputs: tf.Tensor) -> dict[str, tf.Tensor]:
            outputs = tf.nest.flatten(keras.Model.__call__(self, inputs, **options))
            return {f"output_{index}": output for index, output in enumerate(outputs)}

        module = tf.Module()
        module.serve, module.kept = serve, [variable.value for variable in super().variables]
        tf.saved_model.save(module, save_path, signatures={"serving_default": serve})

    def _call_spec(self) -> list[str]:
        import inspect

        return list(inspect.signature(self.call).parameters)
