"""The models' equations written down directly in numpy and float64, sharing no code with tfbig."""

import math

import numpy as np

from tfbig.config import ModelConfig

Weights = dict[str, np.ndarray]


def layer_norm(x: np.ndarray, gamma: np.ndarray, beta: np.ndarray, epsilon: float) -> np.ndarray:
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + epsilon) * gamma + beta


def turn(x: np.ndarray, position: int, config: ModelConfig) -> np.ndarray:
    """Turns pairs (i, i + r/2) of one head's vector, one by one (arXiv 2104.09864)."""
    if config.position_embedding != "rotary":
        return x
    turned, rotary_dim = x.copy(), int(len(x) * config.rotary_fraction)
    for i in range(rotary_dim // 2):
        angle = position / config.rotary_base ** (2 * i / rotary_dim)
        j = i + rotary_dim // 2
        turned[i] = x[i] * math.cos(angle) - x[j] * math.sin(angle)
        turned[j] = x[i] * math.sin(angle) + x[j] * math.cos(angle)
    return turned


def attention(x: np.ndarray, w: Weights, block: str, config: ModelConfig) -> np.ndarray:
    kernel, bias = w[f"{block}/att/qkv/kernel"], w[f"{block}/att/qkv/bias"]
    num_heads, head_dim = kernel.shape[2:]
    out = np.zeros_like(x) + w[f"{block}/att/out/bias"]
    for sample in range(x.shape[0]):
        for head in range(num_heads):
            q, k, v = (x[sample] @ kernel[:, i, head] + bias[i, head] for i in range(3))
            q, k = (np.array([turn(row, t, config) for t, row in enumerate(m)]) for m in (q, k))
            for t in range(x.shape[1]):
                scores = np.array([q[t] @ k[s] for s in range(t + 1)]) / math.sqrt(head_dim)
                weights = np.exp(scores - scores.max())
                weights /= weights.sum()
                mixed = sum(weight * v[s] for s, weight in enumerate(weights))
                out[sample, t] += mixed @ w[f"{block}/att/out/kernel"][head]
    return out


def feed_forward(x: np.ndarray, w: Weights, block: str, activation: str) -> np.ndarray:
    hidden = x @ w[f"{block}/ffn/up/kernel"] + w[f"{block}/ffn/up/bias"]
    if activation == "relu":
        hidden = np.maximum(hidden, 0)
    elif activation == "gelu":
        hidden = hidden * 0.5 * (1 + np.vectorize(math.erf)(hidden / math.sqrt(2)))
    else:
        inner = math.sqrt(2 / math.pi) * (hidden + 0.044715 * hidden**3)
        hidden = 0.5 * hidden * (1 + np.tanh(inner))
    return hidden @ w[f"{block}/ffn/down/kernel"] + w[f"{block}/ffn/down/bias"]


def logits(config: ModelConfig, w: Weights, tokens: np.ndarray) -> np.ndarray:
    table = w["embedding_layer/token_emb/embeddings"]
    x = table[tokens]
    if config.position_embedding == "learned":
        x = x + w["embedding_layer/pos_emb/embeddings"][: tokens.shape[1]]
    for index in range(config.num_layers):
        block = f"transformer_blocks/{index}"
        norms = [
            (w[f"{block}/layernorm{i}/gamma"], w[f"{block}/layernorm{i}/beta"], config.norm_epsilon)
            for i in (1, 2)
        ]
        if config.norm_order == "post":
            x = layer_norm(x + attention(x, w, block, config), *norms[0])
            x = layer_norm(x + feed_forward(x, w, block, config.activation), *norms[1])
        elif config.parallel_residual:
            x = (
                x
                + attention(layer_norm(x, *norms[0]), w, block, config)
                + feed_forward(layer_norm(x, *norms[1]), w, block, config.activation)
            )
        else:
            x = x + attention(layer_norm(x, *norms[0]), w, block, config)
            x = x + feed_forward(layer_norm(x, *norms[1]), w, block, config.activation)
    if config.final_norm:
        x = layer_norm(x, w["final_norm/gamma"], w["final_norm/beta"], config.norm_epsilon)
    if config.tied_head:
        return x @ table.T
    scores = x @ w["dense/kernel"]
    return scores + w["dense/bias"] if config.head_bias else scores


def loss_sum(
    config: ModelConfig, w: Weights, tokens: np.ndarray, labels: np.ndarray, mask: np.ndarray
) -> float:
    scores = logits(config, w, tokens)
    top = scores.max(-1, keepdims=True)
    normaliser = np.log(np.exp(scores - top).sum(-1)) + top[..., 0]
    chosen = np.take_along_axis(scores, labels[..., None], -1)[..., 0]
    return float(((normaliser - chosen) * mask).sum())
