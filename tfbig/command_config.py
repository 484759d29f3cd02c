"""What the commands beside training and preparing can be told. TensorFlow-free."""

from dataclasses import dataclass
from typing import Literal

from tfbig.flags import FreeText


@dataclass(frozen=True, kw_only=True)
class ListConfig:
    """What can be listed instead of training."""

    list_presets: bool = False
    """Prints all presets as a table and ends."""


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Which checkpoint to evaluate on what."""

    run: str = ""
    """Run folder to read."""
    checkpoint: int = -1
    """Step of the checkpoint; -1 means the newest."""
    weights: Literal["model", "ema"] = "model"
    """The weights themselves, or their moving average where the run kept one."""
    split: str = "validation"
    """Split of the data folder to evaluate on."""
    data: str = ""
    """Prepared data folder; empty means the run's own."""
    eval_batch: int = 32
    """Sequences per evaluation step over all ranks."""
    stride: int = 0
    """Labels by which overlapping windows are apart; 0 evaluates rows as they are stored."""
    window: int = 0
    """Tokens of such a window; 0 means the data's sequence length."""
    tasks: tuple[str, ...] = ()
    """Task of lm-evaluation-harness to run instead. Repeat the flag for more."""
    task_path: str = ""
    """Folder of task files besides the harness' own."""


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """Which checkpoint writes what."""

    run: str = ""
    """Run folder to read."""
    checkpoint: int = -1
    """Step of the checkpoint; -1 means the newest."""
    prompt: FreeText = ""
    """Text to continue; empty means an end-of-text token, the start of a document."""
    prompts_file: str = ""
    """File of prompts, a line each, or a JSON string each in a .jsonl; writes JSON lines."""
    num_texts: int = 1
    """Texts to write for each prompt; of several, each is a line of JSON."""
    max_tokens: int = 200
    """Tokens to write at most."""
    min_tokens: int = 0
    """Tokens before which no text ends by itself."""
    logprobs: int = -1
    """Likeliest tokens whose log probabilities are written, as JSON, at each place; -1 is off."""
    logit_bias: tuple[str, ...] = ()
    """TOKEN:BIAS, added to the logits of a token's id. Repeat the flag for more."""
    temperature: float = 0.8
    """Divides the logits; 0 always takes the most likely token."""
    top_k: int = 0
    """Keeps only the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keeps the smallest set of likely tokens whose probability reaches p."""
    min_p: float = 0.0
    """Keeps only tokens at least this fraction as likely as the most likely one."""
    repetition_penalty: float = 1.0
    """Makes tokens that prompt or text already have less likely; 1 is off."""
    presence_penalty: float = 0.0
    """Taken off the logits of tokens that the text has."""
    frequency_penalty: float = 0.0
    """Taken off the logits of tokens once for each time the text has them."""
    num_beams: int = 0
    """Writes the likeliest text by beam search instead of sampling; 0 is off."""
    length_penalty: float = 1.0
    """Beam scores are divided by length to this power; above 0 favours longer texts."""
    no_repeat_ngram_size: int = 0
    """Beam search never repeats as many tokens in a row; 0 is off."""
    early_stopping: Literal["false", "true", "never"] = "false"
    """Ends beam search with num_beams texts, or once no text of its, or of any length is better."""
    stop: tuple[str, ...] = ()
    """Strings that end the text; not printed. Repeat the flag for more."""
    sampling_seed: int = 0
    """Seed of the sampling: the same seed writes the same text."""
