"""A trainer as a model of lm-evaluation-harness, on every strategy. Needs the package lm-eval.

Likelihoods come from `evaluate_step`: the loss of a row whose mask counts the continuation alone is
minus its log-likelihood, and it is the greedy one when every counted label is the most likely.
Token boundaries are those of the harness' own model of the transformers library, so that numbers
compare.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from lm_eval.api.model import LM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from tfbig.generation.generator import generate_tokens
from tfbig.generation.sampling import SamplingOptions
from tfbig.generation.text_stream import TextStream
from tfbig.together import raise_together

_MAX_NEW_TOKENS = 256  # of a request that names no limit, as in the harness

Pair = tuple[list[int], list[int]]  # tokens that are read, tokens that are scored


class TrainerModel(LM):
    """What the harness asks of a model, answered by a trainer; every rank must ask alike.

    Args:
      trainer: built, with weights.
      tokenizer: of the model.
      max_length: positions of the model.
      batch: rows of an evaluation step over all ranks.
    """

    def __init__(self, trainer: Any, tokenizer: Any, max_length: int, batch: int) -> None:
        super().__init__()
        self._trainer, self._tokenizer = trainer, tokenizer
        self._max_length, self._batch = max_length, batch

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Returns (log-likelihood, whether it is the greedy continuation) of each request."""
        pairs = [self._pair(*request.args) for request in requests]
        return self._score(pairs)

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Returns the log-likelihood of each request's text, in windows that don't overlap."""
        results = []
        for request in requests:
            tokens = self._encode(request.args[0])
            windows = get_rolling_token_windows(
                token_list=tokens,
                prefix_token=self._tokenizer.end_of_text_id,
                max_seq_len=self._max_length,
                context_len=1,
            )
            pairs = [make_disjoint_window(window) for window in windows]
            results.append(sum(score for score, _ in self._score(pairs)))
        return results

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Returns what the model writes after each request's text, up to a stop string."""
        return [self._write(*request.args) for request in requests]

    def _encode(self, text: str) -> list[int]:
        return [int(token) for token in self._tokenizer.encode(text)]

    def _pair(self, context: str, continuation: str) -> Pair:
        """Returns the tokens of both parts, cut where the harness cuts them."""
        if not context:
            return [self._tokenizer.end_of_text_id], self._encode(continuation)
        num_spaces = len(context) - len(context.rstrip())
        if num_spaces:  # a space belongs to the word that follows it
            continuation = context[-num_spaces:] + continuation
            context = context[:-num_spaces]
        whole, read = self._encode(context + continuation), self._encode(context)
        return read, whole[len(read) :]

    def _score(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        trainer, results = self._trainer, []
        local = self._batch // trainer.data_size
        own = slice(trainer.data_rank * local, (trainer.data_rank + 1) * local)
        for rows in self._rows(pairs):
            part = {name: value[own] for name, value in rows.items()}
            loss, num_tokens, num_correct = trainer.evaluate_step(part)
            results += [
                (-float(a), bool(b == c))
                for a, b, c in zip(loss, num_tokens, num_correct, strict=True)
            ]
        return results[: len(pairs)]

    def _rows(self, pairs: Sequence[Pair]) -> Iterator[dict[str, np.ndarray]]:
        """Yields batches of one shape; rows that fill the last one up count nothing."""
        width = self._max_length
        for start in range(0, len(pairs), self._batch):
            tokens = np.full((self._batch, width + 1), self._tokenizer.end_of_text_id, np.int32)
            mask = np.zeros((self._batch, width), np.uint8)
            for row, (read, scored) in enumerate(pairs[start : start + self._batch]):
                text = [*read, *scored][-(width + 1) :]  # the end counts, as in the harness
                tokens[row, : len(text)] = text
                mask[row, max(0, len(text) - 1 - len(scored)) : len(text) - 1] = 1
            yield {
                "tokens": tokens,
                "loss_mask": mask,
                "sample_index": np.arange(self._batch, dtype=np.int64),
                "source_index": np.zeros(self._batch, np.int32),
            }

    def _write(self, context: str, options: dict[str, Any]) -> str:
        until = options.get("until") or []
        stream = TextStream([until] if isinstance(until, str) else until)
        limit = int(options.get("max_gen_toks", _MAX_NEW_TOKENS))
        temperature = float(options.get("temperature", 0.0)) if options.get("do_sample") else 0.0
        room = max(1, self._max_length - limit)
        prompt = self._encode(context)[-room:] or [self._tokenizer.end_of_text_id]
        pieces = []
        for token in generate_tokens(
            self._trainer,
            prompt,
            SamplingOptions(temperature=temperature),
            self._max_length,
            limit,
            self._tokenizer.end_of_text_id,
            lambda: stream.stopped,
        ):
            pieces.append(stream.feed(self._tokenizer.decode_bytes([token])))
        return "".join([*pieces, stream.finish()])


def evaluate_tasks(
    trainer: Any, tokenizer: Any, max_length: int, batch: int, tasks: Sequence[str], task_path: str
) -> dict[str, dict[str, Any]]:
    """Returns the harness' results by task.

    Args:
      trainer: built, with weights.
      tokenizer: of the model.
      max_length: positions of the model.
      batch: rows of an evaluation step over all ranks.
      tasks: names.
      task_path: folder of task files besides the harness' own; "" means none.

    Raises:
      UserError: on every rank, there is no such task.
    """
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=task_path or None)
    unknown = [name for name in tasks if name not in manager.all_tasks]
    raise_together(
        trainer,
        f"--tasks={unknown[0]} is no task of the harness or of {task_path!r}: `lm_eval ls tasks` "
        "lists all that there are."
        if unknown
        else None,
    )
    model = TrainerModel(trainer, tokenizer, max_length, batch)
    results = simple_evaluate(model=model, tasks=list(tasks), task_manager=manager)
    return results["results"]
