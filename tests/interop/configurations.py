"""Configurations of transformers' GPT-2 and GPT-NeoX, one awkward option or more each.

Small enough for seconds, on a vocabulary that holds the small data's 384 tokens with padding.
"""

GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 391,
    "n_positions": 48,
    "n_embd": 24,
    "n_layer": 2,
    "n_head": 4,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
NEOX = {
    "model_type": "gpt_neox",
    "vocab_size": 391,
    "max_position_embeddings": 48,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "bos_token_id": 0,
    "eos_token_id": 0,
}

CONFIGURATIONS: dict[str, dict] = {
    "gpt2": GPT2,
    "gpt2 n_inner": GPT2 | {"n_inner": 37},
    "gpt2 untied": GPT2 | {"tie_word_embeddings": False},
    "gpt2 exact gelu": GPT2 | {"activation_function": "gelu"},
    "gpt2 relu": GPT2 | {"activation_function": "relu", "n_inner": 24},
    "gpt2 gelu_pytorch_tanh": GPT2 | {"activation_function": "gelu_pytorch_tanh"},
    "gpt2 one head": GPT2 | {"n_head": 1},
    "gpt2 heads of one dim": GPT2 | {"n_head": 24},
    "gpt2 one layer, three heads": GPT2 | {"n_layer": 1, "n_head": 3},
    "gpt2 odd vocabulary": GPT2 | {"vocab_size": 50257, "n_layer": 1},
    "gpt2 large epsilon": GPT2 | {"layer_norm_epsilon": 1e-2},
    "gpt2 long context": GPT2 | {"n_positions": 1280, "n_layer": 1},
    "gpt2 unscaled scores": GPT2 | {"scale_attn_weights": False},
    "gpt2 scores by layer": GPT2
    | {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True, "n_layer": 3},
    "gpt2 deep and narrow": GPT2 | {"n_layer": 7, "n_embd": 8, "n_head": 2},
    "neox": NEOX,
    "neox sequential": NEOX | {"use_parallel_residual": False},
    "neox all rotary": NEOX | {"rotary_pct": 1.0},
    "neox half rotary": NEOX | {"rotary_pct": 0.5},
    "neox little rotary": NEOX | {"rotary_pct": 0.3},
    "neox other base": NEOX | {"rotary_emb_base": 500000, "rotary_pct": 1.0},
    "neox tied": NEOX | {"tie_word_embeddings": True},
    "neox one head": NEOX | {"num_attention_heads": 1},
    "neox narrow feed-forward": NEOX | {"intermediate_size": 20},
    "neox tanh gelu": NEOX | {"hidden_act": "gelu_new"},
    "neox relu, sequential": NEOX | {"hidden_act": "relu", "use_parallel_residual": False},
    "neox no attention bias": NEOX | {"attention_bias": False},
    "neox padded vocabulary": NEOX | {"vocab_size": 50304, "num_hidden_layers": 1},
    "neox large epsilon": NEOX | {"layer_norm_eps": 1e-3},
    "neox long context": NEOX | {"max_position_embeddings": 1536, "num_hidden_layers": 1},
}
# What cannot come back as it went: the scale of scores is put into the queries, missing biases
# become zeros.
FOLDED = ("gpt2 unscaled scores", "gpt2 scores by layer", "neox no attention bias")
# Kept in golden/ with their logits, for machines without PyTorch.
GOLDEN = {
    "gpt2_n_inner": "gpt2 n_inner",
    "gpt2_scores_by_layer": "gpt2 scores by layer",
    "gpt_neox": "neox",
    "gpt_neox_sequential": "neox sequential",
}
