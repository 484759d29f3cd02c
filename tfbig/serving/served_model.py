"""The model that a server answers with: a trainer with weights, its tokenizer, its card."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfbig.config import Config, ModelConfig, ParallelConfig, count_parameters
from tfbig.errors import UserError
from tfbig.generation.engine import Engine
from tfbig.serve_config import ServeConfig
from tfbig.serving.chat import ChatTemplate
from tfbig.serving.ranks import LeadingTrainer


@dataclass(frozen=True)
class ServedModel:
    """What the server needs of a model, wherever it came from.

    Attributes:
      name: that clients ask for.
      trainer: built, with weights in it.
      tokenizer: data_pipeline's.
      template: of its chats.
      max_length: positions.
      card: facts for people.
    """

    name: str
    trainer: Any
    tokenizer: Any
    template: ChatTemplate
    max_length: int
    card: dict[str, Any]

    def make_engine(self, num_rows: int) -> Engine:
        """Returns an engine with an empty cache."""
        return Engine(self.trainer, num_rows, self.max_length)

    def warm_up(self, num_rows: int) -> None:
        """Traces what the first request would otherwise wait for."""
        from tfbig.generation.completion import Completion
        from tfbig.generation.engine import write_all
        from tfbig.generation.sampling import SamplingOptions

        prompt = [self.tokenizer.end_of_text_id]
        write_all(self.make_engine(num_rows), [Completion(prompt, SamplingOptions(), 2)])

    def most_prompt_bytes(self) -> int:
        """Returns the bytes beyond which a prompt has more tokens than there are positions."""
        if self.tokenizer.description.get("normalizer"):
            return sys.maxsize  # which may make text shorter before there are tokens
        ids = range(self.tokenizer.vocab_size)
        return self.max_length * max(len(self.tokenizer.decode_bytes([token])) for token in ids)

    def chat_encoder(self) -> Callable[[str], list[int]]:
        """Returns what gives the ids of a rendered template.

        A template that came with the tokenizer names special tokens, which must be understood;
        in the plain one they are text, as everywhere else.
        """
        if self.template.is_plain:
            return lambda text: [int(k) for k in self.tokenizer.encode(text)]
        import tokenizers

        library = tokenizers.Tokenizer.from_str(self.tokenizer.library.to_str())
        library.encode_special_tokens = False
        return lambda text: library.encode(text, add_special_tokens=False).ids


def load_model(config: ServeConfig, parallel: dict[str, Any]) -> ServedModel:
    """Returns the model of a run folder or a Hugging Face folder, built and filled.

    Where it is cut over ranks, rank 0's leads the others, which are to follow it.

    Args:
      config: which folder and checkpoint.
      parallel: fields of ParallelConfig that differ from the defaults.

    Raises:
      UserError: there is no such run or checkpoint, or the folder's model is none of ours.
    """
    from tfbig.interop.hugging_face_folder import is_hugging_face_folder

    folder = Path(config.run)
    if config.run and is_hugging_face_folder(folder):
        layout, reader, facts = _hugging_face(folder, parallel)
    else:
        layout, reader, facts = _run_folder(config, parallel)
    import trainers
    from data_pipeline.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(folder)
    trainer = trainers.start(layout)
    trainer.build(training=False, vocab_size=tokenizer.vocab_size)
    if trainer.size > 1 and trainer.layout() is None and not layout.parallel.shard_parameters:
        raise UserError(
            f"each of these {trainer.size} ranks would hold the whole model and compute the same:"
            " start the server in one process, or cut the model with --strategy=pipeline and"
            " --pipeline_parallel_degree or --tensor_parallel_degree."
        )
    trainer.load_state(reader, weights_only=True)
    return ServedModel(
        config.model_name or folder.resolve().name,
        LeadingTrainer(trainer) if trainer.size > 1 and trainer.rank == 0 else trainer,
        tokenizer,
        ChatTemplate.of_folder(folder),
        layout.model.max_length,
        {**card_of(layout.model), **facts, "precision": layout.parallel.precision},
    )


def _run_folder(config: ServeConfig, parallel: dict[str, Any]) -> tuple[Config, Any, dict]:
    """Returns (layout, reader of the weights, facts) of a run folder."""
    from tfbig.saved_run import SavedRun

    saved = SavedRun.open(config.run, config.checkpoint)
    facts = {
        "preset": saved.config.run.preset,
        "trained_on": saved.config.data.data or saved.config.data.source,
        "checkpoint_step": saved.step,
    }
    return saved.with_parallel(parallel), saved.reader, facts


def _hugging_face(folder: Path, parallel: dict[str, Any]) -> tuple[Config, Any, dict]:
    """Returns (layout, reader of the weights, facts) of a Hugging Face folder."""
    from tfbig.interop.hugging_face_folder import HuggingFaceFolder

    reader = HuggingFaceFolder(folder)
    layout = Config(model=reader.model, parallel=ParallelConfig(**parallel))
    return layout, reader, {"format": "Hugging Face folder"}


def card_of(model: ModelConfig) -> dict[str, Any]:
    """Returns a model's facts for people."""
    return {
        "parameters": count_parameters(model),
        "layers": model.num_layers,
        "width": model.embed_dim,
        "heads": model.num_heads,
        "positions": model.max_length,
        "vocabulary": model.vocab_size,
    }
