"""Tokens per second of decoding: with the cache, without it, and by Hugging Face on PyTorch.

usage: python -m benchmarks.generate [--quick]

All take turns in one process on the same shape and random weights, greedy, after a prompt of 32
tokens; medians of wall seconds count. The peer needs torch and transformers.
"""

import dataclasses
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable

from tfbig.command import quiet_tensorflow

quiet_tensorflow()

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

from tfbig import presets  # noqa: E402
from tfbig.config import Config, ModelConfig, ParallelConfig  # noqa: E402
from tfbig.model.context import make_context  # noqa: E402
from trainers.single import SingleTrainer  # noqa: E402

SMALL = ModelConfig(vocab_size=8192, max_length=256, embed_dim=384, num_layers=6, num_heads=6)
PROMPT, ROWS = 32, (1, 8)
BARS = {"uncached": 1.0, "Hugging Face generate": 1.2}


def model_config(quick: bool) -> tuple[str, ModelConfig]:
    """Returns the name and shape that is measured."""
    if quick:
        return "13.9M", SMALL
    return "124M", dataclasses.replace(presets.preset("gpt2_124m").model, max_length=256)


def cached(trainer: SingleTrainer, prompt: np.ndarray, count: int) -> None:
    """Writes `count` tokens a row greedily, by the decode step."""
    num_rows = len(prompt)
    cache = trainer.new_cache(num_rows, trainer.config.model.max_length)
    rows, ones = np.arange(num_rows, dtype=np.int32), np.ones(num_rows, np.int32)
    tokens, valid, reset = prompt, ones * prompt.shape[1], ones > 0
    for _ in range(count):
        logits, cache = trainer.decode_step(tokens, valid, rows, reset, cache)
        tokens, valid, reset = logits.argmax(-1).astype(np.int32)[:, None], ones, ones < 0


def uncached(trainer: SingleTrainer) -> Callable[[np.ndarray, int], None]:
    """Returns what writes tokens by running the whole model on the whole text each time."""

    @tf.function(autograph=False)
    def logits(tokens: tf.Tensor, length: tf.Tensor) -> tf.Tensor:
        batch = {
            "tokens": tf.pad(tokens, [[0, 0], [0, 1]]),
            "sample_index": tf.range(tokens.shape[0], dtype=tf.int64),
        }
        context = make_context(batch, tf.constant(0), False)
        last = trainer.model.hidden_state(tokens, context)[:, length - 1]  # (B, D)
        return trainer.model.last_logits(last)

    def run(prompt: np.ndarray, count: int) -> None:
        text = np.zeros((len(prompt), PROMPT + count), np.int32)
        text[:, :PROMPT] = prompt
        for length in range(PROMPT, PROMPT + count):
            best = logits(tf.constant(text), tf.constant(length)).numpy().argmax(-1)
            text[:, length] = best

    return run


def hugging_face(config: ModelConfig) -> Callable[[np.ndarray, int], None] | None:
    """Returns GPT-2's generate on PyTorch; None where it is not installed."""
    if not all(importlib.util.find_spec(name) for name in ("torch", "transformers")):
        return None
    import torch
    import transformers

    shape = transformers.GPT2Config(
        vocab_size=config.vocab_size,
        n_positions=config.max_length,
        n_embd=config.embed_dim,
        n_layer=config.num_layers,
        n_head=config.num_heads,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = transformers.GPT2LMHeadModel(shape).eval()

    def run(prompt: np.ndarray, count: int) -> None:
        ids = torch.tensor(prompt.astype(np.int64))
        with torch.no_grad():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
            )

    return run


def measure(
    forms: dict[str, Callable[[np.ndarray, int], None]], prompt: np.ndarray, count: int, turns: int
) -> dict[str, float]:
    """Returns the tokens per second of each form; they take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for turn in range(turns + 1):
        for name, run in forms.items():
            start = time.monotonic()
            run(prompt, count)
            if turn:  # the first one traces
                seconds[name].append(time.monotonic() - start)
    return {name: len(prompt) * count / statistics.median(s) for name, s in seconds.items()}


def main() -> None:
    """Prints one line a number of rows and peer."""
    quick = "--quick" in sys.argv
    label, model = model_config(quick)
    trainer = SingleTrainer(Config(model=model, parallel=ParallelConfig(strategy="single")))
    trainer.build(training=False)
    random = np.random.default_rng(0)
    peer = hugging_face(model)
    for num_rows in ROWS:
        prompt = random.integers(0, model.vocab_size, (num_rows, PROMPT), np.int32)
        forms = {
            "cached": lambda prompt, count: cached(trainer, prompt, count),
            "uncached": uncached(trainer),
        }
        if peer is not None:
            forms["Hugging Face generate"] = peer
        rate = measure(forms, prompt, 24 if quick else 64, 1 if quick else 3)
        shown = ", ".join(f"{name} {value:.1f}" for name, value in rate.items())
        print(f"{label}, {num_rows} rows, float32: {shown} tokens/s", flush=True)
        for name, bar in BARS.items():
            title = f"generation, {label}, {num_rows} rows, cached / {name} | >= {bar}"
            if name in rate:
                ratio = rate["cached"] / rate[name]
                print(f"{title} | {ratio:.2f} | {'yes' if ratio >= bar else 'no'}", flush=True)
            else:
                print(f"{title} | torch and transformers are not installed | skipped", flush=True)


if __name__ == "__main__":
    main()
