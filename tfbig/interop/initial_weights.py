"""What `--init_from` names: a checkpoint of ours or a Hugging Face folder. TensorFlow-free."""

import os
from pathlib import Path
from typing import Any

from tfbig.adapters import MergedReader, has_adapters
from tfbig.checkpoint import list_checkpoints
from tfbig.checkpoint_reader import CheckpointReader
from tfbig.config import Config, ModelConfig
from tfbig.errors import UserError
from tfbig.interop.hugging_face_folder import (
    TOKENIZER,
    HuggingFaceFolder,
    is_hugging_face_folder,
    refuse_pickle,
)
from tfbig.run_folder import RunFolder
from tfbig.variables import variable_specs


def open_weights(
    path: str | os.PathLike[str], model: ModelConfig
) -> CheckpointReader | HuggingFaceFolder | MergedReader:
    """Returns the reader of the weights that a run starts from.

    A checkpoint's adapters are gone on with by a model that has such, and merged for one without.

    Args:
      path: a checkpoint's directory, or a folder as transformers saves a model.
      model: of the run.

    Raises:
      UserError: it is neither, or a pickle, or cut, or its adapters are of another scale.
    """
    refuse_pickle(path)
    if Path(path).is_file():
        raise UserError(
            f"--init_from={path} is a file: name the folder that holds the weights, a run's "
            "checkpoints/step_NNNNNNNN or one that transformers saved."
        )
    if is_hugging_face_folder(path):
        return HuggingFaceFolder(path)
    checkpoints = list_checkpoints(RunFolder(path).checkpoints_dir)
    if checkpoints:
        raise UserError(
            f"--init_from={path} is a run's folder: name one of its checkpoints, such as "
            f"{checkpoints[-1].path}."
        )
    reader = CheckpointReader(path, checks_digests=True)
    reader.check_files()
    if not has_adapters(reader.paths()):
        return reader
    alpha = float(reader.manifest["config"]["model"]["lora_alpha"])
    if not model.lora_rank:
        return MergedReader(reader, alpha)
    if alpha != model.lora_alpha:
        raise UserError(
            f"{path} has adapters of --lora_alpha={alpha}, this run of {model.lora_alpha}: they "
            f"would mean something else; give --lora_alpha={alpha}."
        )
    return reader


def open_initial(config: Config) -> CheckpointReader | HuggingFaceFolder | MergedReader | None:
    """Returns the reader of what a run's weights start from, or None.

    Raises:
      UserError: it is no checkpoint and no Hugging Face folder, or of other shapes.
    """
    if not config.run.init_from:
        return None
    reader = open_weights(config.run.init_from, config.model)
    for spec in variable_specs(config.model):
        if reader.has(spec.path) and reader.shape(spec.path) != spec.shape:
            raise UserError(
                f"--init_from={config.run.init_from} has {spec.path} of shape "
                f"{reader.shape(spec.path)}, this model {spec.shape}: give the model that "
                "checkpoint's sizes."
            )
    return reader


def model_fields(init_from: str) -> dict[str, Any]:
    """Returns the model that a Hugging Face folder describes, as flags would; else nothing.

    Args:
      init_from: value of the flag.

    Raises:
      UserError: the folder holds no model that we know.
    """
    if not init_from or not is_hugging_face_folder(init_from):
        return {}
    return HuggingFaceFolder(init_from).model_fields()


def tokenizer_folder(init_from: str) -> str:
    """Returns the Hugging Face folder whose tokenizer the data must be made with, or ""."""
    if not init_from or not is_hugging_face_folder(init_from):
        return ""
    files = {path.name for path in Path(init_from).iterdir()}
    return init_from if TOKENIZER in files or {"vocab.json", "merges.txt"} <= files else ""


def check_tokenizer(init_from: str, data: Any) -> None:
    """Checks that the data has the ids that the weights were trained on.

    Args:
      init_from: value of the flag.
      data: a TokenData.

    Raises:
      UserError: the folder's tokenizer gives other ids.
    """
    folder = tokenizer_folder(init_from)
    if not folder:
        return
    from data_pipeline.tokenizer import Tokenizer

    if _ids(Tokenizer.load(folder)) != _ids(data.tokenizer):
        raise UserError(
            f"{data.folder} was made with another tokenizer than {init_from}, whose ids would mean "
            f"other text: prepare it with --tokenizer={init_from}."
        )


def _ids(tokenizer: Any) -> tuple[dict[str, int], list[tuple[str, ...]]]:
    """Returns vocabulary and merges, which are spelt as pairs or as one word with a space."""
    merges = tokenizer.description["model"]["merges"]
    pairs = [tuple(m.split(" ") if isinstance(m, str) else m) for m in merges]
    return tokenizer.library.get_vocab(with_added_tokens=True), pairs
