"""Builds a trainer whose ranks begin with other values: every rank must end with rank 0's."""

from tfbig.command import quiet_tensorflow

quiet_tensorflow()

import tensorflow as tf  # noqa: E402

from tests.distributed.parity_worker import make_config  # noqa: E402
from trainers.horovod import HorovodTrainer  # noqa: E402


class Differing(HorovodTrainer):
    """Each rank fills all its state, slots included, with its own number."""

    def _make_locals(self, variables, training):
        replicas = super()._make_locals(variables, training)
        for variable in replicas[0].state().values():
            variable.assign(tf.cast(tf.fill(variable.shape, self.rank + 5), variable.dtype))
        return replicas


def main() -> None:
    trainer = Differing(make_config({"fields": {"strategy": "horovod", "ema_decay": 0.5}}))
    trainer.build()
    state = trainer._locals[0].state()
    assert {path.split("/")[0] for path in state} > {"optimizer", "ema"}
    wrong = [path for path, variable in state.items() if float(tf.reduce_max(variable)) != 5.0]
    wrong += [path for path, variable in state.items() if float(tf.reduce_min(variable)) != 5.0]
    print(f"rank {trainer.rank}: {len(state)} variables, not rank 0's: {wrong}", flush=True)
    trainer.barrier(60)
    trainer.close()


if __name__ == "__main__":
    main()
