"""GPT-2 as the transformers library names and stores it. TensorFlow-free.

Its Conv1D kernels are (in, out), ours with dims taken apart. Source of names and defaults: the
library's GPT2Config and GPT2LMHeadModel.
"""

import math
from collections.abc import Mapping
from typing import Any

from tfbig.config import ModelConfig
from tfbig.errors import UserError
from tfbig.interop.architecture import (
    Architecture,
    activation_from,
    activation_to,
    head_view,
)
from tfbig.interop.tensor_view import TensorView, flattened, plain


def _read_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    if config.get("add_cross_attention"):
        raise UserError("its add_cross_attention is true: only decoders of their own are read.")
    width = int(config.get("n_embd", 768))
    return {
        "vocab_size": int(config.get("vocab_size", 50257)),
        "max_length": int(config.get("n_positions", 1024)),
        "embed_dim": width,
        "num_layers": int(config.get("n_layer", 12)),
        "num_heads": int(config.get("n_head", 12)),
        "head_dim": 0,
        "feed_forward_dim": int(config.get("n_inner") or 4 * width),
        "norm_order": "pre",
        "norm_epsilon": float(config.get("layer_norm_epsilon", 1e-5)),
        "final_norm": True,
        "parallel_residual": False,
        "position_embedding": "learned",
        "activation": activation_from(config.get("activation_function", "gelu_new")),
        "tied_head": bool(config.get("tie_word_embeddings", True)),
        "head_bias": False,
        "dropout": float(config.get("resid_pdrop", 0.1)),
        "attention_dropout": float(config.get("attn_pdrop", 0.1)),
        "embedding_dropout": float(config.get("embd_pdrop", 0.1)),
        "init_std": float(config.get("initializer_range", 0.02)),
        "scale_residual_init": True,
        "residual_init_std": 0.0,
    }


def _write_fields(model: ModelConfig) -> dict[str, Any]:
    return {
        "vocab_size": model.vocab_size,
        "n_positions": model.max_length,
        "n_ctx": model.max_length,
        "n_embd": model.embed_dim,
        "n_layer": model.num_layers,
        "n_head": model.num_heads,
        "n_inner": None if model.hidden_dim == 4 * model.embed_dim else model.hidden_dim,
        "activation_function": activation_to(model.activation),
        "resid_pdrop": model.dropout,
        "embd_pdrop": model.embedding_dropout,
        "attn_pdrop": model.attention_dropout,
        "layer_norm_epsilon": model.norm_epsilon,
        "initializer_range": model.init_std,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
        "tie_word_embeddings": model.tied_head,
    }


def _block_views(model: ModelConfig) -> dict[str, TensorView]:
    """Returns the stored tensors of a block by the end of our path; {} stands for its index."""
    width, hidden, heads = model.embed_dim, model.hidden_dim, model.num_heads
    head_dim = model.attention_head_dim
    block = "h.{}."
    return {
        "layernorm1/gamma": plain(block + "ln_1.weight", width),
        "layernorm1/beta": plain(block + "ln_1.bias", width),
        "att/qkv/kernel": flattened(
            block + "attn.c_attn.weight", (width, 3 * width), (width, 3, heads, head_dim)
        ),
        "att/qkv/bias": flattened(block + "attn.c_attn.bias", (3 * width,), (3, heads, head_dim)),
        "att/out/kernel": flattened(
            block + "attn.c_proj.weight", (width, width), (heads, head_dim, width)
        ),
        "att/out/bias": plain(block + "attn.c_proj.bias", width),
        "layernorm2/gamma": plain(block + "ln_2.weight", width),
        "layernorm2/beta": plain(block + "ln_2.bias", width),
        "ffn/up/kernel": plain(block + "mlp.c_fc.weight", width, hidden),
        "ffn/up/bias": plain(block + "mlp.c_fc.bias", hidden),
        "ffn/down/kernel": plain(block + "mlp.c_proj.weight", hidden, width),
        "ffn/down/bias": plain(block + "mlp.c_proj.bias", width),
    }


def _views(model: ModelConfig) -> dict[str, TensorView]:
    width = model.embed_dim
    views = {
        "embedding_layer/token_emb/embeddings": plain("wte.weight", model.vocab_size, width),
        "embedding_layer/pos_emb/embeddings": plain("wpe.weight", model.max_length, width),
        "final_norm/gamma": plain("ln_f.weight", width),
        "final_norm/beta": plain("ln_f.bias", width),
    }
    for suffix, view in _block_views(model).items():
        for index in range(model.num_layers):
            named = view._replace(name=view.name.format(index))
            views[f"transformer_blocks/{index}/{suffix}"] = named
    if not model.tied_head:
        views["dense/kernel"] = head_view("lm_head.weight", model)
    return views


def _query_scale(config: Mapping[str, Any], layer: int) -> float:
    """Returns the factor that makes our scores, always divided by sqrt(head_dim), theirs."""
    scale = 1.0
    if not config.get("scale_attn_weights", True):
        scale = math.sqrt(int(config.get("n_embd", 768)) // int(config.get("n_head", 12)))
    if config.get("scale_attn_by_inverse_layer_idx", False):
        scale /= layer + 1
    return scale


GPT2 = Architecture(
    model_type="gpt2",
    class_name="GPT2LMHeadModel",
    prefix="transformer.",
    head_names=("lm_head.weight",),
    ignored=(".attn.bias", ".attn.masked_bias"),
    read_fields=_read_fields,
    write_fields=_write_fields,
    views=_views,
    query_scale=_query_scale,
    has_attention_bias=lambda config: True,
)
