"""The data of a run, prepared on first use."""

import os
from typing import Any

from tfbig.config import Config, PrepareConfig
from tfbig.errors import UserError
from tfbig.interop.initial_weights import tokenizer_folder
from tfbig.together import together


def default_data_folder(config: Config) -> str:
    """Returns the folder that --source is prepared into when --data is not given."""
    from data_pipeline.preparation import default_folder

    name = config.data.source
    if folder := tokenizer_folder(config.run.init_from):
        name += f"_{os.path.basename(os.path.abspath(folder))}"
    return default_folder(name, config.model.vocab_size, config.data.sequence_length)


def open_data(config: Config, trainer: Any) -> Any:
    """Returns the data, prepared on first use by rank 0 while the others wait.

    Raises:
      UserError: on every rank, when it cannot be prepared or does not fit the model.
    """
    together(trainer, lambda: _prepare_first(config) if trainer.rank == 0 else None)
    return together(trainer, lambda: _open_prepared(config))


def _prepare_first(config: Config) -> None:
    """Prepares the source that --source names, unless another folder was named or it is there."""
    from data_pipeline import manifest
    from data_pipeline.preparation import prepare

    path = config.data.data
    if path == default_data_folder(config) and not manifest.exists(path):
        prepare(
            PrepareConfig(
                data=path,
                source=config.data.source,
                sequence_length=config.data.sequence_length,
                vocab_size=config.model.vocab_size,
                tokenizer=tokenizer_folder(config.run.init_from),
            )
        )


def _open_prepared(config: Config) -> Any:
    from data_pipeline.dataset import TokenData

    path, length = config.data.data, config.data.sequence_length
    data = TokenData.open(
        path, vocab_size=config.model.vocab_size, data_workers=config.data.data_workers
    )
    if data.sequence_length != length:
        raise UserError(
            f"{path} holds samples of {data.sequence_length} tokens, not --sequence_length="
            f"{length}: pass --sequence_length={data.sequence_length} or prepare another folder."
        )
    return data
