"""Loads a checkpoint of two tensor shards on one device, saves it whole, and prints what it took.

usage: resharding_worker.py FOLDER EMBED_DIM NUM_LAYERS
"""

import json
import re
import sys
from pathlib import Path

import numpy as np

from tfbig.command import quiet_tensorflow

quiet_tensorflow()

from tfbig.checkpoint import latest  # noqa: E402
from tfbig.checkpoint_format import LazyArray, RunState, Slice  # noqa: E402
from tfbig.checkpoint_reader import CheckpointReader  # noqa: E402
from tfbig.checkpoint_writer import CheckpointWriter  # noqa: E402
from tfbig.config import Config, ModelConfig, count_parameters  # noqa: E402
from tfbig.variables import variable_specs  # noqa: E402
from trainers.single import SingleTrainer  # noqa: E402
from trainers.tensor_table import shard_table  # noqa: E402


def bytes_held(field: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(re.search(rf"{field}:\s+(\d+) kB", text)[1]) * 1024


def write_shards(model: ModelConfig, folder: Path) -> None:
    """Writes, as two ranks of a tensor group do, values that say where they are."""
    sizes = {"data": 1, "pipeline": 1, "tensor": 2}
    paths = [spec.path for spec in variable_specs(model)]
    for rank in (1, 0):  # rank 0 waits for the other's part
        shards = shard_table(model, paths, {"data": 0, "pipeline": 0, "tensor": rank}, sizes)
        slices = [
            Slice(
                path,
                shard.global_shape,
                shard.start,
                LazyArray(
                    shard.valid_shape,
                    np.float32,
                    lambda seed=rank + 2 * index, shape=shard.valid_shape: np.random.default_rng(
                        seed
                    ).random(shape, np.float32),
                ),
                shard.is_counted,
            )
            for index, (path, shard) in enumerate(shards.items())
        ]
        CheckpointWriter(folder, rank, 2).save(1, slices, RunState(consumed_samples=1), "shards")


def main(folder: Path, embed_dim: int, num_layers: int) -> None:
    model = ModelConfig(
        vocab_size=8192, max_length=256, embed_dim=embed_dim, num_layers=num_layers, num_heads=8
    )
    write_shards(model, folder / "shards")
    reader = CheckpointReader(latest(folder / "shards").path)
    trainer = SingleTrainer(Config(model=model))
    before = bytes_held("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    trainer.build(training=False)
    assert trainer.load_state(reader, weights_only=True) == []
    weights = [part for part in trainer.state_slices() if reader.has(part.path)]
    CheckpointWriter(folder / "whole").save(1, weights, RunState(consumed_samples=1))
    extra = bytes_held("VmHWM") - before
    whole = CheckpointReader(latest(folder / "whole").path)
    for path in reader.paths():
        np.testing.assert_array_equal(whole.read(path), reader.read(path))
    model_bytes = 4 * count_parameters(model)
    print(json.dumps({"model_bytes": model_bytes, "extra": extra}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
