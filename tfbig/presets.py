"""Named starting points: functions that return a Config. TensorFlow-free.

The GPT-3 table of the paper (arXiv 2005.14165, table 2.1) contradicts itself in two rows. We take
width 5120 for 13B (40 heads of 128; the paper prints 5140) and 16 heads for 1.3B (2048 / 128; the
paper prints 24).
"""

import functools
from collections.abc import Callable

from tfbig.config import Config, DataConfig, ModelConfig, OptimizerConfig, RunConfig
from tfbig.errors import UserError, near_matches


def gpt_tiny() -> Config:
    """1.3M parameters, trained on the standard library's source in minutes on a laptop."""
    return Config(
        model=ModelConfig(
            vocab_size=4096, max_length=256, embed_dim=128, num_layers=4, num_heads=4
        ),
        optimizer=OptimizerConfig(learning_rate=4e-3, warmup_steps=40, decay_steps=400),
        data=DataConfig(sequence_length=256),
        run=RunConfig(preset="gpt_tiny", steps=400, global_batch=32),
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
    """GPT-2 (Radford et al. 2019): context 1024, vocabulary 50257, batch 512."""
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
    """GPT-3 (arXiv 2005.14165): 300 billion tokens, cosine to 10% over 260 billion."""
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
    table: dict[str, Callable[[], Config]] = {"gpt_tiny": gpt_tiny, "blog": blog}
    table |= {name: functools.partial(_gpt2, name, *shape) for name, shape in gpt2.items()}
    table |= {name: functools.partial(_gpt3, name, *row) for name, row in gpt3.items()}
    return table


def names() -> list[str]:
    """Returns the names of all presets."""
    return list(_table())


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
