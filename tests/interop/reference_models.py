"""Transformers' models with random weights of which each matters. Needs PyTorch.

`python -m tests.interop.reference_models` writes golden/ anew.
"""

import os
import shutil
from pathlib import Path

import numpy as np

from tests.interop.configurations import CONFIGURATIONS, GOLDEN

GOLDEN_FOLDER = Path(__file__).parent / "golden"
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def reference_model(fields: dict, seed: int = 0):
    """Returns a model in evaluation mode: norms near 1, biases and all else clearly not 0."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    kind = fields["model_type"]
    config = AutoConfig.for_model(kind, **{k: v for k, v in fields.items() if k != "model_type"})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = parameter.dim() == 1 and name.endswith("weight")
            parameter.copy_(1.0 + 0.2 * noise if is_norm else 0.15 * noise)
    return model


def some_tokens(vocab_size: int, num_rows: int, length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab_size, (num_rows, length)).astype(np.int32)


def logits_of(model, tokens: np.ndarray) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.tensor(tokens.astype(np.int64))).logits.numpy()


def write_golden() -> None:
    from safetensors.numpy import save_file

    shutil.rmtree(GOLDEN_FOLDER, ignore_errors=True)
    for name, title in GOLDEN.items():
        fields = CONFIGURATIONS[title]
        model = reference_model(fields)
        folder = GOLDEN_FOLDER / name
        model.save_pretrained(folder)
        (folder / "generation_config.json").unlink()
        tokens = some_tokens(fields["vocab_size"], 1, 16)
        logits = logits_of(model, tokens)
        save_file({"tokens": tokens, "logits": logits}, GOLDEN_FOLDER / f"{name}.safetensors")


if __name__ == "__main__":
    write_golden()
