"""Runs both SageMaker scripts, one after the other, in one process of a launch.

usage: scripts_worker.py FOLDER FLAG ...

Alone it also writes what the second script's model started from, and the SavedModel it left.
"""

import functools
import sys

import numpy as np

from tfbig.command import quiet_tensorflow

quiet_tensorflow()

import tensorflow as tf  # noqa: E402

from examples.sagemaker_scripts import train_horovod, train_smp  # noqa: E402
from trainers import hvd, smp  # noqa: E402

# Keras adds epsilon before it corrects the moments' bias, tfbig after it, as the paper does: it is
# made too small to matter, or gradients near it would step by different lengths.
EPSILON = 1e-12
tf.keras.optimizers.Adam = functools.partial(tf.keras.optimizers.Adam, epsilon=EPSILON)

folder, *flags = sys.argv[1:]
made: list[tf.keras.Model] = []


class Noted(train_smp.MyModel):
    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        made.append(self)


def write_initial() -> None:
    if smp.size() == 1:
        values = {str(i): v.numpy() for i, v in enumerate(made[0].variables)}
        np.savez(f"{folder}/initial.npz", **values)
    print(f"rank {smp.rank()} has {len(made[0].trainable_variables)} variables", flush=True)


sys.argv[1:] = flags
train_horovod.main()
size = hvd.size()
hvd.shutdown()
print("the second script", flush=True)
smp.register_post_partition_hook(write_initial)
train_smp.MyModel = Noted
steps = int(flags[-1].removeprefix("--steps=")) // size
more = [f"--steps={steps}", f"--partitions={size}", f"--checkpoint_dir={folder}/{size}"]
sys.argv[1:] = [*flags, *more]
train_smp.main()
if smp.rank() == 0:
    saved = tf.saved_model.load(f"{folder}/{size}/saved_model")
    tokens = tf.cast(tf.range(16)[tf.newaxis], tf.uint16)  # as the data holds them
    outputs = saved.signatures["serving_default"](inputs=tokens)
    np.savez(f"{folder}/saved_{size}.npz", logits=outputs["output_0"].numpy())
smp.shutdown()
