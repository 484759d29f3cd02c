"""Model-parallel training of a GPT with SageMaker's calls, as scripts were written for it.

horovodrun -np 2 python -m examples.sagemaker_scripts.train_smp --partitions=2 --data=FOLDER
"""

import argparse

import tensorflow as tf
import tensorflow_datasets as tfds

# was: import horovod.tensorflow as hvd
import trainers.hvd as hvd

# was: import smdistributed.modelparallel.tensorflow as smp
import trainers.smp as smp
from examples.sagemaker_scripts.layers import TokenAndPositionEmbedding, TransformerBlock
from examples.sagemaker_scripts.train_horovod import arguments


class MyModel(smp.DistributedModel):
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


def get_dataset(args):
    """Returns batches of (tokens, labels): the same on all ranks that hold one replica."""
    in_order = tfds.ReadConfig(interleave_cycle_length=1)
    dataset = tfds.builder_from_directory(args.data).as_dataset("train", read_config=in_order)
    dataset = dataset.map(lambda row: (row["tokens"][:-1], row["tokens"][1:]))
    dataset = dataset.shard(smp.dp_size(), smp.dp_rank())
    if args.shuffle:
        # SMP: what is random is keyed by dp_rank, so that a replica's ranks see the same rows.
        dataset = dataset.shuffle(args.shuffle, seed=smp.dp_rank())
    # SMP: whole batches only, so that they divide into microbatches.
    return dataset.repeat().batch(args.batch_size, drop_remainder=True).prefetch(1)


def main():
    """Trains and saves."""
    parser = arguments(argparse.ArgumentParser(description=__doc__))
    parser.add_argument("--partitions", type=int, default=1)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--pipeline", default="interleaved")
    parser.add_argument("--shuffle", type=int, default=0)
    args = parser.parse_args()

    # The launcher's `distribution` said this.
    config = {name: getattr(args, name) for name in ("partitions", "microbatches", "pipeline")}
    smp.init({**config, "horovod": True})

    tf.keras.utils.set_random_seed(args.seed)
    model = MyModel(
        args.maxlen,
        args.vocab_size,
        args.embed_dim,
        args.num_heads,
        args.feed_forward_dim,
        args.num_layers,
        args.dropout,
    )
    optimizer = tf.keras.optimizers.Adam(args.learning_rate)
    loss_object = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    accuracy = tf.keras.metrics.SparseCategoricalAccuracy(name="accuracy")

    # SMP: forward, loss and gradients of one microbatch.
    @smp.step
    def get_grads(tokens, labels):
        predictions = model(tokens, training=True)[0]
        loss = loss_object(labels, predictions)
        gradients = optimizer.get_gradients(loss, model.trainable_variables)
        return gradients, loss, predictions

    @tf.function
    def train_step(tokens, labels, first_batch):
        gradients, loss, predictions = get_grads(tokens, labels)

        # SMP: the mean over the microbatches; Horovod: and over the replicas.
        gradients = [hvd.allreduce(gradient.accumulate()) for gradient in gradients]
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        if first_batch:
            hvd.broadcast_variables(model.variables, root_rank=0)
            hvd.broadcast_variables(optimizer.variables(), root_rank=0)

        # SMP: the microbatches' predictions together, and the mean of their losses.
        accuracy.update_state(labels, predictions.merge())
        return loss.reduce_mean()

    for batch, (tokens, labels) in enumerate(get_dataset(args).take(args.steps)):
        loss = train_step(tokens, labels, batch == 0)
        if batch % args.print_every == 0 and smp.rank() == 0:
            shown = f"loss {float(loss):.7f} accuracy {float(accuracy.result()):.4f}"
            print(f"step {batch} {shown}", flush=True)

    if args.checkpoint_dir:
        checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
        smp.CheckpointManager(checkpoint, args.checkpoint_dir).save()
        model.save_model(f"{args.checkpoint_dir}/saved_model")


if __name__ == "__main__":
    main()
