"""GPT-NeoX and Pythia as the transformers library names and stores them. TensorFlow-free.

Its linear layers are (out, in), and queries, keys and values are interleaved by head: the fused
projection's rows are (H, 3, d). Source of names and defaults: the library's GPTNeoXConfig and
GPTNeoXForCausalLM.
"""

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
from tfbig.interop.tensor_view import TensorView, plain


def _rotary(config: Mapping[str, Any]) -> tuple[float, float]:
    """Returns (fraction, base) of either generation of the file: rotary_pct or rope_parameters.

    Raises:
      UserError: angles that are stretched, or an odd number of turned dims.
    """
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise UserError(f"its rotary embedding is of type {kind!r}: only 'default' is read.")
    fraction = float(rope.get("partial_rotary_factor", config.get("rotary_pct", 0.25)))
    base = float(rope.get("rope_theta", config.get("rotary_emb_base", 10000)))
    head_dim = int(config.get("hidden_size", 6144)) // int(config.get("num_attention_heads", 64))
    if int(head_dim * fraction) % 2:
        raise UserError(
            f"its rotary embedding turns {int(head_dim * fraction)} dims of a head "
            f"({head_dim} x {fraction}), an odd number."
        )
    return fraction, base


def _read_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    fraction, base = _rotary(config)
    dropout = float(config.get("hidden_dropout", 0.0))
    return {
        "vocab_size": int(config.get("vocab_size", 50432)),
        "max_length": int(config.get("max_position_embeddings", 2048)),
        "embed_dim": int(config.get("hidden_size", 6144)),
        "num_layers": int(config.get("num_hidden_layers", 44)),
        "num_heads": int(config.get("num_attention_heads", 64)),
        "head_dim": 0,
        "feed_forward_dim": int(config.get("intermediate_size", 24576)),
        "norm_order": "pre",
        "norm_epsilon": float(config.get("layer_norm_eps", 1e-5)),
        "final_norm": True,
        "parallel_residual": bool(config.get("use_parallel_residual", True)),
        "position_embedding": "rotary",
        "rotary_fraction": fraction,
        "rotary_base": base,
        "activation": activation_from(config.get("hidden_act", "gelu")),
        "tied_head": bool(config.get("tie_word_embeddings", False)),
        "head_bias": False,
        "dropout": dropout,
        "attention_dropout": float(config.get("attention_dropout", 0.0)),
        "embedding_dropout": dropout,
        "init_std": float(config.get("initializer_range", 0.02)),
    }


def _rotary_pct(model: ModelConfig) -> float:
    """Returns a fraction that gives our number of turned dims when rounded down.

    >>> _rotary_pct(ModelConfig(embed_dim=20, num_heads=1, position_embedding="rotary",
    ...                         rotary_fraction=0.35))
    0.3
    """
    head_dim, turned = model.attention_head_dim, model.rotary_dim
    if int(head_dim * model.rotary_fraction) == turned:
        return model.rotary_fraction
    exact = turned / head_dim
    return exact if int(head_dim * exact) == turned else (turned + 0.5) / head_dim


def _write_fields(model: ModelConfig) -> dict[str, Any]:
    return {
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_length,
        "hidden_size": model.embed_dim,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "intermediate_size": model.hidden_dim,
        "hidden_act": activation_to(model.activation),
        # Versions 4 and 5 of the library both read these two.
        "rotary_pct": _rotary_pct(model),
        "rotary_emb_base": model.rotary_base,
        "attention_dropout": model.attention_dropout,
        "hidden_dropout": model.dropout,
        "layer_norm_eps": model.norm_epsilon,
        "initializer_range": model.init_std,
        "use_parallel_residual": model.parallel_residual,
        "attention_bias": True,
        "tie_word_embeddings": model.tied_head,
    }


def _linear(name: str, num_in: int, num_out: int) -> TensorView:
    return TensorView(name, (num_out, num_in), (num_out, num_in), (1, 0))


def _block_views(model: ModelConfig) -> dict[str, TensorView]:
    """Returns the stored tensors of a block by the end of our path; {} stands for its index."""
    width, hidden, heads = model.embed_dim, model.hidden_dim, model.num_heads
    head_dim = model.attention_head_dim
    block = "layers.{}."
    return {
        "layernorm1/gamma": plain(block + "input_layernorm.weight", width),
        "layernorm1/beta": plain(block + "input_layernorm.bias", width),
        "att/qkv/kernel": TensorView(
            block + "attention.query_key_value.weight",
            (3 * width, width),
            (heads, 3, head_dim, width),
            (3, 1, 0, 2),  # (D, 3, H, d)
        ),
        "att/qkv/bias": TensorView(
            block + "attention.query_key_value.bias",
            (3 * width,),
            (heads, 3, head_dim),
            (1, 0, 2),  # (3, H, d)
        ),
        "att/out/kernel": TensorView(
            block + "attention.dense.weight",
            (width, width),
            (width, heads, head_dim),
            (1, 2, 0),  # (H, d, D)
        ),
        "att/out/bias": plain(block + "attention.dense.bias", width),
        "layernorm2/gamma": plain(block + "post_attention_layernorm.weight", width),
        "layernorm2/beta": plain(block + "post_attention_layernorm.bias", width),
        "ffn/up/kernel": _linear(block + "mlp.dense_h_to_4h.weight", width, hidden),
        "ffn/up/bias": plain(block + "mlp.dense_h_to_4h.bias", hidden),
        "ffn/down/kernel": _linear(block + "mlp.dense_4h_to_h.weight", hidden, width),
        "ffn/down/bias": plain(block + "mlp.dense_4h_to_h.bias", width),
    }


def _views(model: ModelConfig) -> dict[str, TensorView]:
    width = model.embed_dim
    views = {
        "embedding_layer/token_emb/embeddings": plain("embed_in.weight", model.vocab_size, width),
        "final_norm/gamma": plain("final_layer_norm.weight", width),
        "final_norm/beta": plain("final_layer_norm.bias", width),
    }
    for suffix, view in _block_views(model).items():
        for index in range(model.num_layers):
            named = view._replace(name=view.name.format(index))
            views[f"transformer_blocks/{index}/{suffix}"] = named
    if not model.tied_head:
        views["dense/kernel"] = head_view("embed_out.weight", model)
    return views


GPT_NEOX = Architecture(
    model_type="gpt_neox",
    class_name="GPTNeoXForCausalLM",
    prefix="gpt_neox.",
    head_names=("embed_out.weight", "lm_head.weight"),
    ignored=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
    read_fields=_read_fields,
    write_fields=_write_fields,
    views=_views,
    query_scale=lambda config, layer: 1.0,
    has_attention_bias=lambda config: bool(config.get("attention_bias", True)),
)
