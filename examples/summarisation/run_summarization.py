"""Fine-tunes a GPT to summarise: dialogue, "TL;DR:", summary; the loss is on the summary alone.

Writes what transformers' example of the same name writes: train_results.json, eval_results.json,
predict_results.json, all_results.json and generated_predictions.txt. From the repository's root:

    python -m examples.summarisation.run_summarization --output_dir=runs/summaries
    python -m examples.summarisation.run_summarization --init_from=FOLDER --train_file=train.jsonl \
        --validation_file=val.jsonl --test_file=test.jsonl --lora_rank=8 --output_dir=runs/samsum
"""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.dataset import TokenData
from data_pipeline.preparation import prepare
from data_pipeline.tokenizer import Tokenizer
from examples.summarisation.dialogues import write_dialogues
from tfbig import evaluate, train
from tfbig.command import run_command
from tfbig.command_config import EvaluateConfig
from tfbig.config import Config, PrepareConfig, flops_per_token, section_values
from tfbig.durable_file import write_atomic
from tfbig.errors import UserError
from tfbig.flags import Flags
from tfbig.interop.initial_weights import open_initial
from tfbig.run_folder import read_metrics
from tfbig.saved_run import SavedRun

SEPARATOR = "\nTL;DR:"
_SPLITS = {"train": "train", "validation": "val", "test": "test"}  # as prepare knows files by name


@dataclass(frozen=True, kw_only=True)
class SummarisationConfig:
    """What to summarise, with which model; names as in transformers' example where it has them."""

    train_file: str = ""
    """jsonl of records with text and summary; empty makes dialogues up."""
    validation_file: str = ""
    """The same, for the loss and ROUGE after training."""
    test_file: str = ""
    """The same, for the predictions."""
    text_column: str = "dialogue"
    """Field of what is summarised."""
    summary_column: str = "summary"
    """Field of the summary."""
    output_dir: str = "runs/summarisation"
    """Folder of the run, the data and the results."""
    init_from: str = ""
    """Hugging Face folder or checkpoint to start from; empty trains a small model from nothing."""
    tokenizer: str = ""
    """Tokenizer of a checkpoint's model; a Hugging Face folder brings its own."""
    max_target_length: int = 48
    """Most tokens of a summary that is generated."""
    max_predict_samples: int = 50
    """Most records of the validation and of the test file that summaries are generated for."""
    sequence_length: int = 128
    """Tokens of a row: text and summary must fit in it."""
    vocab_size: int = 512
    """Entries of the tokenizer that is trained when there is none."""
    steps: int = 300
    """Updates."""
    global_batch: int = 16
    """Rows of an update."""
    learning_rate: float = 3e-3
    """Peak learning rate."""
    lora_rank: int = 0
    """Rank of adapters; 0 trains the whole model."""
    seed: int = 0
    """Seed of weights, data order and made-up dialogues."""


class Summariser:
    """Writes summaries greedily with the weights of a trainer.

    Args:
      trainer: built, with weights.
      tokenizer: of the model.
      max_length: positions of the model.
      max_tokens: of a summary.
    """

    def __init__(
        self, trainer: Any, tokenizer: Tokenizer, max_length: int, max_tokens: int
    ) -> None:
        self._trainer, self._tokenizer = trainer, tokenizer
        self._max_length, self._max_tokens = max_length, max_tokens

    def __call__(self, text: str) -> str:
        from tfbig.generation.generator import generate_tokens
        from tfbig.generation.sampling import SamplingOptions

        end = self._tokenizer.end_of_text_id
        prompt = [end, *self._tokenizer.encode(text + SEPARATOR).tolist()]
        tokens = generate_tokens(
            self._trainer,
            prompt,
            SamplingOptions(temperature=0),
            self._max_length,
            self._max_tokens,
            end,
        )
        return self._tokenizer.decode(list(tokens)).strip()


def rouge(predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Returns the mean F1 x 100 of rouge1, rouge2, rougeL and rougeLsum, rounded to 4 decimals.

    Args:
      predictions: summaries, sentences separated by newlines for rougeLsum.
      references: as many.
    """
    from rouge_score.rouge_scorer import RougeScorer

    names = ["rouge1", "rouge2", "rougeL", "rougeLsum"]
    scorer = RougeScorer(names, use_stemmer=True)
    scores = [scorer.score(r, p) for r, p in zip(references, predictions, strict=True)]
    means = {name: float(np.mean([score[name].fmeasure for score in scores])) for name in names}
    return {name: round(100 * mean, 4) for name, mean in means.items()}


def read_records(path: Path, config: SummarisationConfig) -> list[tuple[str, str]]:
    """Returns (text, summary) of each line; records with an empty side are left out.

    Raises:
      UserError: the file is missing, or a record lacks a field.
    """
    records = []
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                value = json.loads(line)
                pair = tuple(
                    value.get(name) for name in (config.text_column, config.summary_column)
                )
                if not all(isinstance(part, str) for part in pair):
                    raise UserError(
                        f'{path} line {number} lacks "{config.text_column}" or '
                        f'"{config.summary_column}": give --text_column and --summary_column.'
                    )
                if all(pair):
                    records.append(pair)
    except (OSError, json.JSONDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    return records


def prepare_data(
    config: SummarisationConfig, records: dict[str, list[tuple[str, str]]], folder: Path
) -> TokenData:
    """Returns rows of whole records, several a row, none of which sees another."""
    source = folder / "pairs"
    source.mkdir(parents=True, exist_ok=True)
    for split, pairs in records.items():
        lines = [
            json.dumps({"prompt": text + SEPARATOR, "completion": f" {summary}"}) + "\n"
            for text, summary in pairs
        ]
        write_atomic(source / f"{_SPLITS[split]}.jsonl", "".join(lines).encode())
    tokenizer = config.tokenizer
    if not tokenizer and (Path(config.init_from) / "tokenizer.json").is_file():
        tokenizer = config.init_from
    return TokenData.open(
        prepare(
            PrepareConfig(
                data=str(folder / "data"),
                source=f"pile:{source}",
                prompt_field="prompt",
                completion_field="completion",
                packing="best_fit",
                document_mask=True,
                sequence_length=config.sequence_length,
                vocab_size=config.vocab_size,
                tokenizer=tokenizer,
                workers=1,
            )
        )
    )


def training_config(config: SummarisationConfig, data: TokenData) -> Config:
    """Returns the run: the model that it starts from, or a small one."""
    values: dict[str, Any] = {
        "data": str(data.folder),
        "sequence_length": config.sequence_length,
        "run_dir": str(Path(config.output_dir) / "run"),
        "steps": config.steps,
        "decay_steps": config.steps,
        "warmup_steps": config.steps // 20,
        "global_batch": config.global_batch,
        "learning_rate": config.learning_rate,
        "eval_every": 0,
        "checkpoint_every": 0,
        "seed": config.seed,
        "lora_rank": config.lora_rank,
        "init_from": config.init_from,
    }
    if not config.init_from:
        values |= {"vocab_size": data.vocab_size, "max_length": config.sequence_length}
        values |= {"embed_dim": 64, "num_layers": 2, "num_heads": 4}
    return train.config_from(values)


def summariser_of(run: Config, tokenizer: Tokenizer, max_tokens: int, weights: Any) -> Summariser:
    """Returns a summariser on one device.

    Args:
      run: of the model.
      tokenizer: of the model.
      max_tokens: of a summary.
      weights: a reader; None keeps the initial weights.
    """
    from trainers.single import SingleTrainer

    trainer = SingleTrainer(run)
    trainer.build(training=False, vocab_size=tokenizer.vocab_size)
    if weights is not None:
        trainer.load_state(weights, weights_only=True)
    return Summariser(trainer, tokenizer, run.model.max_length, max_tokens)


def scored(
    prefix: str, summarise: Summariser, tokenizer: Tokenizer, records: list[tuple[str, str]]
) -> tuple[dict[str, float], list[str]]:
    """Returns ROUGE and counts under names that begin with `prefix`, and the summaries."""
    start = time.perf_counter()
    predictions = [summarise(text) for text, _ in records]
    seconds = time.perf_counter() - start
    scores: dict[str, float] = rouge(predictions, [summary for _, summary in records])
    scores["gen_len"] = round(float(np.mean([len(tokenizer.encode(p)) for p in predictions])), 4)
    scores |= {"runtime": round(seconds, 4), "samples": len(records)}
    scores["samples_per_second"] = round(len(records) / seconds, 3)
    scores["steps_per_second"] = scores["samples_per_second"]  # a step writes one summary
    return {f"{prefix}_{name}": value for name, value in scores.items()}, predictions


def train_results(config: Config, num_samples: int) -> dict[str, float]:
    """Returns what transformers' trainer reports of the training."""
    steps, global_batch = read_metrics(config.run.run_dir), config.run.global_batch
    length = config.data.sequence_length
    tokens = len(steps) * global_batch * length
    seconds = sum(record["step_seconds"] for record in steps)
    return {
        "epoch": round(len(steps) * global_batch / max(1, num_samples), 4),
        "total_flos": tokens * flops_per_token(config.model, length),
        "train_loss": round(float(np.mean([record["loss"] for record in steps])), 4),
        "train_runtime": round(seconds, 4),
        "train_samples": num_samples,
        "train_samples_per_second": round(len(steps) * global_batch / seconds, 3),
        "train_steps_per_second": round(len(steps) / seconds, 3),
    }


def write_results(folder: Path, results: dict[str, dict[str, float]], texts: list[str]) -> None:
    """Writes a file for each part, one of all, and the predictions, one a line."""
    everything: dict[str, float] = {}
    for name, values in results.items():
        everything |= values
        write_atomic(folder / f"{name}_results.json", json.dumps(values, indent=4).encode())
    write_atomic(folder / "all_results.json", json.dumps(everything, indent=4).encode())
    lines = "\n".join(" ".join(text.split()) for text in texts)
    write_atomic(folder / "generated_predictions.txt", lines.encode())


def run(config: SummarisationConfig) -> dict[str, dict[str, float]]:
    """Trains, evaluates and predicts; returns the results that it writes, by file."""
    folder = Path(config.output_dir)
    given = {
        "train": config.train_file,
        "validation": config.validation_file,
        "test": config.test_file,
    }
    if any(given.values()) and not all(given.values()):
        raise UserError("--train_file, --validation_file and --test_file go together.")
    files = {split: Path(path) for split, path in given.items()}
    if not config.train_file:
        counts = {"train": 2000, "validation": 100, "test": 100}
        files = write_dialogues(folder / "dialogues", counts, config.seed)
    records = {split: read_records(path, config) for split, path in files.items()}
    data = prepare_data(config, records, folder)
    run_config = training_config(config, data)
    start = open_initial(run_config)
    train.run(run_config, ["run_summarization"])
    return _measure(config, run_config, data, records, start)


def _measure(
    config: SummarisationConfig,
    run_config: Config,
    data: TokenData,
    records: dict[str, list[tuple[str, str]]],
    start: Any,
) -> dict[str, dict[str, float]]:
    """Returns and writes the results, those of the untuned start among them."""
    run_dir, tokenizer = run_config.run.run_dir, data.tokenizer
    held_out = {
        split: records[split][: config.max_predict_samples] for split in ("validation", "test")
    }
    untuned = summariser_of(run_config, tokenizer, config.max_target_length, start)
    before, _ = scored("start", untuned, tokenizer, held_out["test"])
    losses = {
        name: round(evaluate.run(EvaluateConfig(run=run_dir, split=split), {})["loss"], 4)
        for name, split in (("eval", "validation"), ("predict", "test"))
    }
    tuned = summariser_of(
        run_config, tokenizer, config.max_target_length, SavedRun.open(run_dir).reader
    )
    evaluation, _ = scored("eval", tuned, tokenizer, held_out["validation"])
    prediction, texts = scored("predict", tuned, tokenizer, held_out["test"])
    training = train_results(run_config, len(records["train"]))
    results = {
        "train": training,
        "eval": {"epoch": training["epoch"], "eval_loss": losses["eval"]} | evaluation,
        "predict": {"predict_loss": losses["predict"]} | prediction,
        "start": before,
    }
    write_results(Path(config.output_dir), results, texts)
    for line in _table(results):
        print(line)
    return results


def _table(results: dict[str, dict[str, float]]) -> Iterator[str]:
    yield f"{'ROUGE':<10}{'start':>10}{'tuned':>10}   (test file)"
    for name in ("rouge1", "rouge2", "rougeL", "rougeLsum"):
        before, after = results["start"][f"start_{name}"], results["predict"][f"predict_{name}"]
        yield f"{name:<10}{before:>10.2f}{after:>10.2f}"


def _body(arguments: Sequence[str]) -> None:
    flags = Flags("run_summarization", (SummarisationConfig,), "fine-tunes a GPT to summarise.")
    run(SummarisationConfig(**section_values(SummarisationConfig, flags.parse(arguments))))


if __name__ == "__main__":
    run_command("run_summarization", _body, sys.argv[1:])
