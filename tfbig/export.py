"""Writes a checkpoint in another format: `python -m tfbig.export --run=runs/gpt_tiny`."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfbig.command import run_command
from tfbig.config import section_values
from tfbig.errors import UserError
from tfbig.export_config import ExportConfig
from tfbig.flags import Flags
from tfbig.saved_run import SavedRun


def run(config: ExportConfig) -> Path:
    """Writes the checkpoint that `config` names, and says what was written.

    With --push a folder that is there already is uploaded as it is, not written again.

    Args:
      config: which checkpoint, as what, where to.

    Returns:
      What was written: a folder, or a .keras file.

    Raises:
      UserError: no such run or checkpoint, the format cannot hold the model, or the output exists.
    """
    if config.max_shard_megabytes < 1:
        raise UserError(
            f"--max_shard_megabytes={config.max_shard_megabytes} must be at least 1: leave it out "
            "for the default, 5000."
        )
    output = Path(config.output or _default_output(config))
    if config.push:
        from tfbig.interop.hub_upload import check_repository

        check_repository(config.push)
        if config.format != "hf":
            raise UserError(
                f"--push uploads --format=hf, not --format={config.format}: leave one of them out."
            )
        if output.is_dir():
            return _push(config, output)
    saved = SavedRun.open(config.run, config.checkpoint)
    write = {"hf": _write_hugging_face, "keras": _write_keras, "saved_model": _write_saved_model}
    notes = write[config.format](saved, config, output)
    print(f"{output}: {config.run} at step {saved.step}, --format={config.format}")
    for note in notes:
        print(f"  {note}")
    return _push(config, output) if config.push else output


def _push(config: ExportConfig, output: Path) -> Path:
    """Uploads a folder that is there, or says what would be uploaded."""
    from tfbig.interop.hub_upload import push

    for line in push(output, config.push, config.private, config.dry_run):
        print(line)
    return output


def _default_output(config: ExportConfig) -> Path:
    suffix = ".keras" if config.format == "keras" else ""
    return Path(config.run) / "export" / f"{config.format}{suffix}"


def _write_hugging_face(saved: SavedRun, config: ExportConfig, output: Path) -> list[str]:
    from data_pipeline.tokenizer import END_OF_TEXT, Tokenizer
    from tfbig.interop.exported_folder import appearing
    from tfbig.interop.hugging_face_export import (
        ExportedTokenizer,
        architecture_for,
        trimmed,
        write_folder,
    )
    from tfbig.interop.model_card import CardOptions, write_model_card

    contents = saved.folder.tokenizer_path.read_bytes()
    tokenizer = Tokenizer(contents, str(saved.folder.tokenizer_path))
    described = ExportedTokenizer(
        contents, tokenizer.vocab_size, END_OF_TEXT, tokenizer.end_of_text_id
    )
    model = saved.merged_model
    architecture_for(model)
    if config.trim_vocabulary:
        model = trimmed(model, tokenizer.vocab_size)
    name = config.push or output.name
    options = CardOptions(config.license, config.language, config.base_model, config.watts)
    with appearing(output) as folder:
        write_model_card(folder, saved, name, options)
        return write_folder(
            folder,
            saved.merged_weights(config.weights),
            model,
            described,
            config.dtype,
            config.max_shard_megabytes * 1_000_000,
        )


def _write_keras(saved: SavedRun, config: ExportConfig, output: Path) -> list[str]:
    from tfbig.interop.exported_folder import appearing_file

    if output.suffix != ".keras":
        raise UserError(f"--output={output}: the name of a Keras file ends in .keras.")
    with appearing_file(output) as path:
        from tfbig.interop.keras_model import ExportedGPT

        exported = ExportedGPT.of(saved.merged_model)
        _fill(exported.gpt, saved, config)
        exported.save(path)
    return ["keras.models.load_model reads it after `import tfbig.interop.keras_model`"]


def _write_saved_model(saved: SavedRun, config: ExportConfig, output: Path) -> list[str]:
    from data_pipeline.tokenizer import Tokenizer
    from tfbig.interop.exported_folder import appearing
    from tfbig.interop.saved_model import write_saved_model
    from tfbig.model.gpt import GPT

    tokenizer = Tokenizer.load(saved.folder.tokenizer_path)
    version = output / str(max(saved.step, 1))
    with appearing(version) as folder:
        model = GPT.from_config(saved.merged_model, initial_values=False, attention="plain")
        _fill(model, saved, config)
        write_saved_model(folder, model, tokenizer.vocab_size, tokenizer.end_of_text_id)
        extra = folder / "assets.extra"
        extra.mkdir()
        (extra / "tokenizer.json").write_bytes(saved.folder.tokenizer_path.read_bytes())
    return [f"version {version.name}; signatures serving_default (logits) and generate"]


def _fill(model: Any, saved: SavedRun, config: ExportConfig) -> None:
    """Sets a whole model's variables to the checkpoint's weights, one at a time."""
    weights = saved.merged_weights(config.weights)
    for path, variable in model.canonical_variables().items():
        variable.assign(weights.read(path))


def _body(arguments: Sequence[str]) -> None:
    flags = Flags("export", (ExportConfig,), "writes a checkpoint in another format.")
    run(ExportConfig(**section_values(ExportConfig, flags.parse(arguments))))


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command and exits."""
    run_command("export", _body, sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    main()
