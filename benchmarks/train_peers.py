"""One side of benchmarks/train.py: trains a GPT of a given shape, or multiplies matrices.

usage: python benchmarks/train_peers.py NAME SHAPE [N]

SHAPE is JSON, see `Shape`. It says `@{"built": ...}` once it has made its first two steps, then
answers each line "N" on standard input with `@{...}` about N more steps, and ends with its input;
with N as an argument it makes so many steps and reads nothing, as under horovodrun.
It runs under whatever interpreter has the peer, and needs nothing of tfbig but for `tfbig` itself.
"""

import json
import os
import platform
import resource
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

Step = Callable[[], object]
WARM_UP = 2  # steps that trace, compile and allocate


class Shape(NamedTuple):
    """A model and a batch; dropout is 0 on all sides."""

    num_layers: int
    embed_dim: int
    num_heads: int
    vocab_size: int
    length: int
    rows: int
    dtype: str  # "float32" or "bfloat16": of the arithmetic; weights and optimizer are float32
    num_threads: int


def batch_of(shape: Shape):
    """Returns random tokens (rows, length + 1) int32."""
    import numpy as np

    size = (shape.rows, shape.length + 1)
    return np.random.default_rng(0).integers(0, shape.vocab_size, size, np.int32)


def tfbig(shape: Shape, **fields) -> Step:
    """Returns a training step as `tfbig train` makes it, on one process or under Horovod."""
    import tensorflow as tf

    import trainers
    from tfbig.attention_trial import choose_attention
    from tfbig.config import Config, replace_fields
    from tfbig.hardware import gpu_memory_bytes

    values = {
        "num_layers": shape.num_layers,
        "embed_dim": shape.embed_dim,
        "num_heads": shape.num_heads,
        "vocab_size": shape.vocab_size,
        "max_length": shape.length,
        "sequence_length": shape.length,
        "global_batch": shape.rows,
        "precision": shape.dtype,
        "num_threads": shape.num_threads,
    }
    config = replace_fields(Config(), values | fields)
    trainer = trainers.trainer_class(config.parallel.strategy)(config)
    choose_attention(config, trainer, gpu_memory_bytes())
    trainer.build()
    own = slice(trainer.data_rank, None, trainer.data_size)
    tokens = batch_of(shape)[own]
    batch = {
        "tokens": tf.constant(tokens),
        "sample_index": tf.range(len(tokens), dtype=tf.int64),
        "source_index": tf.zeros([len(tokens)], tf.int32),
        "loss_mask": tf.ones([len(tokens), shape.length], tf.uint8),
    }
    return lambda: trainer.train_step(batch, 0, 1e-4, 0.0, 0).loss_sum.numpy()


def tfbig_compiled(shape: Shape) -> Step:
    """Returns the same under XLA."""
    return tfbig(shape, jit_compile=True)


def tfbig_horovod(shape: Shape) -> Step:
    """Returns the same on the processes that horovodrun started."""
    return tfbig(shape, strategy="horovod")


def keras_hub(shape: Shape) -> Step:
    """Returns a step of KerasHub's GPT-2, as its `fit` makes it on the TensorFlow backend."""
    os.environ["KERAS_BACKEND"] = "tensorflow"
    import keras
    import tensorflow as tf
    from keras_hub.models import GPT2Backbone, GPT2CausalLM

    _tensorflow_threads(shape.num_threads)
    policy = "float32" if shape.dtype == "float32" else "mixed_bfloat16"
    keras.config.set_dtype_policy(policy)
    backbone = GPT2Backbone(
        vocabulary_size=shape.vocab_size,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        hidden_dim=shape.embed_dim,
        intermediate_dim=4 * shape.embed_dim,
        dropout=0.0,
        max_sequence_length=shape.length,
    )
    model = GPT2CausalLM(backbone=backbone, preprocessor=None)
    model.compile(
        optimizer=keras.optimizers.AdamW(1e-4),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=[],
    )
    tokens = batch_of(shape)
    inputs = {
        "token_ids": tf.constant(tokens[:, :-1]),
        "padding_mask": tf.ones([shape.rows, shape.length], tf.bool),
    }
    labels = tf.constant(tokens[:, 1:])
    return lambda: model.train_on_batch(inputs, labels)


def blog(shape: Shape) -> Step:
    """Returns a step of the blog's model: its block, mended, and heads as wide as the model.

    Source: ORIGINAL's design (AWS, 2022): post-norm, ReLU, an untied head, Adam in a tf.function.
    """
    import keras
    import tensorflow as tf

    _tensorflow_threads(shape.num_threads)
    keras.config.set_dtype_policy("float32" if shape.dtype == "float32" else "mixed_bfloat16")
    width, layers = shape.embed_dim, keras.layers
    tokens = keras.Input([shape.length], dtype="int32")
    positions = layers.Embedding(shape.length, width)(tf.range(shape.length))
    hidden = layers.Embedding(shape.vocab_size, width)(tokens) + positions  # (B, T, D)
    for _ in range(shape.num_layers):
        attention = layers.MultiHeadAttention(shape.num_heads, key_dim=width)
        attended = attention(hidden, hidden, use_causal_mask=True)
        hidden = layers.LayerNormalization(epsilon=1e-6)(hidden + attended)
        inner = layers.Dense(4 * width, activation="relu")(hidden)
        hidden = layers.LayerNormalization(epsilon=1e-6)(hidden + layers.Dense(width)(inner))
    model = keras.Model(tokens, layers.Dense(shape.vocab_size)(hidden))
    optimizer = keras.optimizers.Adam(1e-4)
    optimizer.build(model.trainable_variables)
    loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    batch = tf.constant(batch_of(shape))

    @tf.function
    def train(inputs, labels):
        with tf.GradientTape() as tape:
            loss = loss_function(labels, model(inputs, training=True))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    return lambda: train(batch[:, :-1], batch[:, 1:]).numpy()


def hugging_face(shape: Shape, compiled: bool = False) -> Step:
    """Returns a step of Hugging Face's GPT-2 on PyTorch, with its fused attention and AdamW."""
    import contextlib

    import torch
    import transformers

    torch.set_num_threads(shape.num_threads)
    config = transformers.GPT2Config(
        vocab_size=shape.vocab_size,
        n_positions=shape.length,
        n_embd=shape.embed_dim,
        n_layer=shape.num_layers,
        n_head=shape.num_heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        attn_implementation="sdpa",
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = transformers.GPT2LMHeadModel(config).train()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    ids = torch.tensor(batch_of(shape).astype("int64"), device=device)
    inputs, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    run = torch.compile(model) if compiled else model
    in_bfloat16 = shape.dtype == "bfloat16"

    def step():
        mixed = torch.autocast(device, torch.bfloat16) if in_bfloat16 else contextlib.nullcontext()
        with mixed:
            logits = run(inputs).logits  # (B, T, V)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def hugging_face_compiled(shape: Shape) -> Step:
    """Returns the same under torch.compile."""
    return hugging_face(shape, compiled=True)


def matmul(shape: Shape) -> Step:
    """Returns a step that multiplies square matrices and returns the best size's FLOP/s."""
    import tensorflow as tf

    _tensorflow_threads(shape.num_threads)
    product = tf.function(lambda x: tf.reduce_max(tf.matmul(x, x)), autograph=False)
    sizes = (1024, 2048) if shape.rows * shape.length <= 512 else (1024, 2048, 4096)
    squares = [tf.cast(tf.random.stateless_normal([n, n], [0, n]), shape.dtype) for n in sizes]
    return lambda: max(_flops(len(x), lambda x=x: product(x).numpy()) for x in squares)


def torch_matmul(shape: Shape) -> Step:
    """Returns the same with PyTorch's matrix products."""
    import torch

    torch.set_num_threads(shape.num_threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, shape.dtype)
    sizes = (1024, 2048) if shape.rows * shape.length <= 512 else (1024, 2048, 4096)
    squares = [torch.randn(n, n, device=device, dtype=dtype) for n in sizes]
    return lambda: max(_flops(len(x), lambda x=x: (x @ x).max().item()) for x in squares)


def _flops(size: int, run: Step) -> float:
    start = time.perf_counter()
    run()
    return 2.0 * size**3 / (time.perf_counter() - start)


def _tensorflow_threads(count: int) -> None:
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(count)


MAKERS = {
    "tfbig": tfbig,
    "tfbig_compiled": tfbig_compiled,
    "tfbig_horovod": tfbig_horovod,
    "keras_hub": keras_hub,
    "hugging_face": hugging_face,
    "hugging_face_compiled": hugging_face_compiled,
    "blog": blog,
    "matmul": matmul,
    "torch_matmul": torch_matmul,
}


def peak_bytes() -> int:
    """Returns the most memory this process has used: of a GPU if it computes on one."""
    torch, tensorflow = sys.modules.get("torch"), sys.modules.get("tensorflow")
    if torch is not None and torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    if tensorflow is not None and tensorflow.config.list_physical_devices("GPU"):
        return tensorflow.config.experimental.get_memory_info("GPU:0")["peak"]
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def device_of(dtype: str) -> dict:
    """Returns the name of the device that TensorFlow computes on, and its peak in FLOP/s."""
    import tensorflow as tf

    from tfbig.hardware import peak_flops

    peak, source = peak_flops(dtype)
    name = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    for gpu in tf.config.get_visible_devices("GPU")[:1]:
        name = tf.config.experimental.get_device_details(gpu).get("device_name", "a GPU")
    return {"name": name, "peak_flops": peak, "peak_source": source}


def say(record: dict) -> None:
    """Prints one answer, told apart from what libraries print."""
    print("\n@" + json.dumps(record), flush=True)


def main() -> None:
    """Builds, warms up, answers."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    name, shape = sys.argv[1], Shape(**json.loads(sys.argv[2]))
    step = MAKERS[name](shape)
    first = time.perf_counter()
    for _ in range(WARM_UP):
        step()
    built = {"built": True, "warm_up_seconds": time.perf_counter() - first}
    say(built | ({"device": device_of(shape.dtype)} if name == "tfbig" else {}))
    for line in sys.argv[3:] or sys.stdin:
        seconds, results = [], []
        begin = time.process_time()
        for _ in range(int(line)):
            start = time.perf_counter()
            results.append(float(step()))
            seconds.append(time.perf_counter() - start)
        cpu = (time.process_time() - begin) / len(seconds)
        say({"seconds": seconds, "cpu": cpu, "results": results, "peak": peak_bytes()})


if __name__ == "__main__":
    main()
