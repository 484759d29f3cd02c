"""Data-parallel training of a GPT with Horovod's calls, as scripts were written for SageMaker.

horovodrun -np 2 python -m examples.sagemaker_scripts.train_horovod --data=FOLDER
"""

import argparse

import tensorflow as tf
import tensorflow_datasets as tfds

import trainers.hvd as hvd  # was: import horovod.tensorflow as hvd
from examples.sagemaker_scripts.layers import TokenAndPositionEmbedding, TransformerBlock


class MyModel(tf.keras.Model):
    """A GPT whose call returns the logits and the embeddings."""

    def __init__(
        self, maxlen, vocab_size, embed_dim, num_heads, feed_forward_dim, num_layers, rate=0.1
    ):
        super().__init__()
        self.embedding_layer = TokenAndPositionEmbedding(maxlen, vocab_size, embed_dim)
        self.transformer_blocks = [
            TransformerBlock(embed_dim, num_heads, feed_forward_dim, rate)
            for _ in range(num_layers)
        ]
        self.dense = tf.keras.layers.Dense(vocab_size)

    def call(self, inputs, training=None):
        x_emb = self.embedding_layer(inputs)
        x = x_emb
        for block in self.transformer_blocks:
            x = block(x, training=training)
        return [self.dense(x), x_emb]


def init_train_settings(args):
    """Returns model, optimizer and loss."""
    model = MyModel(
        args.maxlen,
        args.vocab_size,
        args.embed_dim,
        args.num_heads,
        args.feed_forward_dim,
        args.num_layers,
        args.dropout,
    )
    # The learning rate grows with the number of devices.
    optimizer = tf.keras.optimizers.Adam(args.learning_rate * hvd.size())
    return model, optimizer, tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def get_dataset(args):
    """Returns this rank's share of the prepared text: batches of (tokens, labels)."""
    in_order = tfds.ReadConfig(interleave_cycle_length=1)
    dataset = tfds.builder_from_directory(args.data).as_dataset("train", read_config=in_order)
    dataset = dataset.map(lambda row: (row["tokens"][:-1], row["tokens"][1:]))
    dataset = dataset.shard(hvd.size(), hvd.rank()).repeat()
    return dataset.batch(args.batch_size, drop_remainder=True).prefetch(1)


def arguments(parser):
    """Adds the flags that both scripts have."""
    parser.add_argument("--data", required=True)
    parser.add_argument("--maxlen", type=int, default=256)
    parser.add_argument("--vocab_size", type=int, default=4096)
    parser.add_argument("--embed_dim", type=int, default=128)
    parser.add_argument("--num_heads", type=int, default=4)
    parser.add_argument("--feed_forward_dim", type=int, default=512)
    parser.add_argument("--num_layers", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10000)
    parser.add_argument("--print_every", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint_dir", default="")
    return parser


def main():
    """Trains and saves."""
    args = arguments(argparse.ArgumentParser(description=__doc__)).parse_args()

    # Horovod: start it, and pin one GPU to each process.
    hvd.init()
    gpus = tf.config.list_physical_devices("GPU")
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)
    if gpus:
        tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")

    tf.keras.utils.set_random_seed(args.seed)
    model, optimizer, loss_object = init_train_settings(args)

    @tf.function
    def training_step(tokens, labels, first_batch):
        with tf.GradientTape() as tape:
            predictions = model(tokens, training=True)[0]
            loss = loss_object(labels, predictions)

        # Horovod: average the gradients of all ranks.
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        # Horovod: all ranks go on from rank 0's variables, once the optimizer's exist.
        if first_batch:
            hvd.broadcast_variables(model.variables, root_rank=0)
            hvd.broadcast_variables(optimizer.variables(), root_rank=0)
        return loss

    for batch, (tokens, labels) in enumerate(get_dataset(args).take(args.steps // hvd.size())):
        loss = training_step(tokens, labels, batch == 0)
        if batch % args.print_every == 0 and hvd.rank() == 0:
            print(f"step {batch} loss {float(loss):.7f}", flush=True)

    # Horovod: only rank 0 writes.
    if hvd.rank() == 0 and args.checkpoint_dir:
        # Keras 3 hands a checkpoint of the model no layer that stands in a list, and so no block.
        variables = [v.value for v in [*model.variables, *optimizer.variables()]]
        tf.train.Checkpoint(variables=variables).save(f"{args.checkpoint_dir}/gpt")


if __name__ == "__main__":
    main()
