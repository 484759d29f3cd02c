"""Named starting points: functions that return a Config. TensorFlow-free.

Initial values of the GPT-NeoX family: small_init (arXiv 1910.05895) and, into the residual stream,
wang_init, 2 / (layers x sqrt(width)).

The GPT-3 table of the paper (arXiv 2005.14165, table 2.1) contradicts itself in two rows. We take
width 5120 for 13B (40 heads of 128; the paper prints 5140) and 16 heads for 1.3B (2048 / 128; the
paper prints 24).

Pythia (arXiv 2304.01373) and GPT-NeoX-20B (arXiv 2204.06745): where the sources disagree we take
the file the model was trained with, hence 2.5e-4 for pythia_1b (a table elsewhere says 3e-4) and
0.97e-4 for neox_20b (its model card says 0.97e-5, which is the floor). The file of pythia_12b
names no initial values; it gets the others'.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

from tfbig.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    count_parameters,
    flops_per_token,
    to_dict,
)
from tfbig.errors import UserError, near_matches


def gpt_tiny() -> Config:
    """1.3M parameters, trained on the standard library's source in minutes on a laptop."""
    return Config(
        model=ModelConfig(
            vocab_size=4096, max_length=256, embed_dim=128, num_layers=4, num_heads=4
        ),
        optimizer=OptimizerConfig(learning_rate=4e-3, warmup_steps=30, decay_steps=300),
        data=DataConfig(sequence_length=256),
        run=RunConfig(preset="gpt_tiny", steps=300, global_batch=16),
    )


def blog() -> Config:
    """The original's model, small: post-norm, ReLU, untied head with bias, wide heads."""
    return Config(
        model=ModelConfig(
            vocab_size=4096,
            max_length=256,
            embed_dim=128,
            num_layers=2,
            num_heads=2,
            head_dim=128,
            feed_forward_dim=256,
            norm_order="post",
            norm_epsilon=1e-6,
            final_norm=False,
            activation="relu",
            tied_head=False,
            head_bias=True,
            dropout=0.1,
            scale_residual_init=False,
        ),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=40, decay_steps=400),
        data=DataConfig(sequence_length=256),
        run=RunConfig(preset="blog", steps=400, global_batch=32),
    )


def _gpt2(name: str, num_layers: int, embed_dim: int, num_heads: int) -> Config:
    """GPT-2 (Radford et al. 2019): context 1024, vocabulary 50257, batch 512.

    It publishes no learning rate: peak and warm-up are GPT-1's (Radford et al. 2018, section 4.1),
    the number of steps is ours.
    """
    return Config(
        model=ModelConfig(
            vocab_size=50257,
            max_length=1024,
            embed_dim=embed_dim,
            num_layers=num_layers,
            num_heads=num_heads,
            dropout=0.1,
            attention_dropout=0.1,
            embedding_dropout=0.1,
        ),
        optimizer=OptimizerConfig(learning_rate=2.5e-4, warmup_steps=2000, decay_steps=600_000),
        data=DataConfig(sequence_length=1024),
        run=RunConfig(preset=name, steps=600_000, global_batch=512, eval_every=1000),
    )


def _gpt3(
    name: str,
    num_layers: int,
    embed_dim: int,
    num_heads: int,
    batch_tokens: int,
    learning_rate: float,
) -> Config:
    """GPT-3 (arXiv 2005.14165): 300 billion tokens, cosine to 10% over 260 billion.

    The paper's 3.2M tokens of 175B are 1562.5 samples; its preset takes 1552 (3,178,496 tokens),
    the largest multiple of 16 below, so that replicas and microbatches divide them.
    """
    global_batch = batch_tokens // 2048
    return Config(
        model=ModelConfig(
            vocab_size=50257,
            max_length=2048,
            embed_dim=embed_dim,
            num_layers=num_layers,
            num_heads=num_heads,
        ),
        optimizer=OptimizerConfig(
            learning_rate=learning_rate,
            warmup_steps=375_000_000 // batch_tokens,
            decay_steps=260_000_000_000 // batch_tokens,
        ),
        data=DataConfig(sequence_length=2048),
        run=RunConfig(
            preset=name,
            steps=300_000_000_000 // batch_tokens,
            global_batch=global_batch,
            eval_every=1000,
            checkpoint_every=1000,
        ),
    )


def _neox(
    name: str,
    num_layers: int,
    embed_dim: int,
    num_heads: int,
    vocab_size: int,
    learning_rate: float,
    global_batch: int = 1024,
    steps: int = 143_000,
    weight_decay: float = 0.1,
) -> Config:
    """GPT-NeoX: a quarter of each head rotary, sublayers in parallel, untied, padded vocabulary."""
    return Config(
        model=ModelConfig(
            vocab_size=vocab_size,
            max_length=2048,
            embed_dim=embed_dim,
            num_layers=num_layers,
            num_heads=num_heads,
            position_embedding="rotary",
            rotary_fraction=0.25,
            parallel_residual=True,
            activation="gelu",
            tied_head=False,
            init_std=math.sqrt(2 / (5 * embed_dim)),
            residual_init_std=2 / (num_layers * math.sqrt(embed_dim)),
        ),
        optimizer=OptimizerConfig(
            learning_rate=learning_rate,
            warmup_steps=steps // 100,
            decay_steps=steps,
            weight_decay=weight_decay,
        ),
        data=DataConfig(sequence_length=2048),
        run=RunConfig(
            preset=name,
            steps=steps,
            global_batch=global_batch,
            eval_every=1000,
            checkpoint_every=1000,
        ),
    )


def _table() -> dict[str, Callable[[], Config]]:
    half, one, two = 1 << 19, 1 << 20, 1 << 21  # tokens: the paper's 0.5M, 1M and 2M
    gpt2 = {
        "gpt2_124m": (12, 768, 12),
        "gpt2_355m": (24, 1024, 16),
        "gpt2_774m": (36, 1280, 20),
        "gpt2_1558m": (48, 1600, 25),
    }
    gpt3 = {
        "gpt3_125m": (12, 768, 12, half, 6e-4),
        "gpt3_350m": (24, 1024, 16, half, 3e-4),
        "gpt3_760m": (24, 1536, 16, half, 2.5e-4),
        "gpt3_1_3b": (24, 2048, 16, one, 2e-4),
        "gpt3_2_7b": (32, 2560, 32, one, 1.6e-4),
        "gpt3_6_7b": (32, 4096, 32, two, 1.2e-4),
        "gpt3_13b": (40, 5120, 40, two, 1e-4),
        "gpt3_175b": (96, 12288, 96, 3_200_000 // 2048 // 16 * 16 * 2048, 6e-5),
    }
    neox: dict[str, tuple[Any, ...]] = {
        "pythia_14m": (6, 128, 4, 50304, 1e-3),
        "pythia_31m": (6, 256, 8, 50304, 1e-3),
        "pythia_70m": (6, 512, 8, 50304, 1e-3),
        "pythia_160m": (12, 768, 12, 50304, 6e-4),
        "pythia_410m": (24, 1024, 16, 50304, 3e-4),
        "pythia_1b": (16, 2048, 8, 50304, 2.5e-4),
        "pythia_1_4b": (24, 2048, 16, 50304, 2e-4),
        "pythia_2_8b": (32, 2560, 32, 50304, 1.6e-4),
        "pythia_6_9b": (32, 4096, 32, 50432, 1.2e-4),
        "pythia_12b": (36, 5120, 40, 50688, 1.2e-4),
        "neox_20b": (44, 6144, 64, 50432, 0.97e-4, 1536, 150_000, 0.01),
    }
    table: dict[str, Callable[[], Config]] = {"gpt_tiny": gpt_tiny, "blog": blog}
    table |= {name: functools.partial(_gpt2, name, *shape) for name, shape in gpt2.items()}
    table |= {name: functools.partial(_gpt3, name, *row) for name, row in gpt3.items()}
    table |= {name: functools.partial(_neox, name, *row) for name, row in neox.items()}
    return table


def listing() -> str:
    """Returns all presets as a table: parameters, shape, and FLOPs per trained token."""
    lines = [
        f"{'preset':<12} {'parameters':>15} {'width':>6} {'layers':>6} {'heads':>5} {'context':>7}"
        f" {'FLOPs/token':>11} {'batch':>6} {'learning rate':>13}"
    ]
    for name in names():
        config = preset(name)
        model = config.model
        lines.append(
            f"{name:<12} {count_parameters(model):>15,} {model.embed_dim:>6} {model.num_layers:>6}"
            f" {model.num_heads:>5} {model.max_length:>7}"
            f" {flops_per_token(model, config.data.sequence_length):>11.3g}"
            f" {config.run.global_batch:>6} {config.optimizer.learning_rate:>13g}"
        )
    return "\n".join(lines)


def names() -> list[str]:
    """Returns the names of all presets."""
    return list(_table())


def default_values() -> dict[str, object]:
    """Returns every field of a run without flags: those of the preset that RunConfig names.

    >>> default_values()["steps"]
    300
    """
    sections = to_dict(preset(RunConfig.preset)).values()
    return {name: value for section in sections for name, value in section.items()}


def preset(name: str) -> Config:
    """Returns the configuration called `name`.

    Raises:
      UserError: no preset has that name.

    >>> preset("gpt2_124m").model.num_layers
    12
    """
    table = _table()
    if name not in table:
        raise UserError(
            f"--preset={name} is not known.{near_matches(name, list(table))}"
            f" The presets are: {', '.join(table)}."
        )
    return table[name]()
