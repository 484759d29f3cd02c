"""Saves under some layouts and resumes under them from the checkpoints of all that have saved.

usage: layouts_worker.py FOLDER JSON, where JSON is {"layouts": {name: fields}, "saves": bool,
"chain": name or ""}: the layout that makes the next steps of the run which changes layout.
"""

import json
import sys
from pathlib import Path

import numpy as np

from tfbig.command import quiet_tensorflow

quiet_tensorflow()

import trainers  # noqa: E402
from tests.distributed.parity_worker import NUM_SOURCES, local_batch, make_config  # noqa: E402
from tfbig.checkpoint import latest  # noqa: E402
from tfbig.checkpoint_format import RunState  # noqa: E402
from tfbig.checkpoint_reader import CheckpointReader  # noqa: E402
from tfbig.checkpoint_writer import CheckpointWriter  # noqa: E402

FIELDS = {"optimizer": "adamw", "learning_rate": 3e-3, "ema_decay": 0.9, "clip_norm": 0.5}
MODEL = {"num_layers": 2, "dropout": 0.2, "attention_dropout": 0.1, "tied_head": True}
SAVED_STEPS, MORE_STEPS = 3, 2


def make_trainer(fields: dict):
    config = make_config({"fields": {**FIELDS, **fields}, "model": MODEL})
    trainer = trainers.trainer_class(config.parallel.strategy)(config)
    trainer.build(num_sources=NUM_SOURCES)
    return trainer


def steps(trainer, first: int, count: int) -> list[float]:
    rate = trainer.config.optimizer.learning_rate
    made = []
    for step in range(first, first + count):
        result = trainer.train_step(local_batch(trainer, step), step, rate, 0.0, 0)
        made.append(float(result.loss_sum / result.num_tokens))
    return made


def save(trainer, folder: Path, step: int) -> None:
    writer = CheckpointWriter(folder, trainer.rank, trainer.size, timeout_seconds=120)
    attempt = f"{folder.name}_{step}"
    writer.save(step, trainer.state_slices(), RunState(consumed_samples=48 * step), attempt)
    writer.wait_until_complete(step, attempt)
    trainer.barrier(120)


def newest(folder: Path) -> CheckpointReader:
    info = latest(folder)
    assert info is not None, folder
    return CheckpointReader(info.path)


def main(folder: Path, job: dict) -> None:
    for name, fields in job["layouts"].items():
        trainer = make_trainer(fields)
        saw = {}
        if job["saves"]:
            saw["begun"] = steps(trainer, 0, SAVED_STEPS)
            save(trainer, folder / "saved" / name, SAVED_STEPS)
            saw["undisturbed"] = steps(trainer, SAVED_STEPS, MORE_STEPS)
        for source in sorted(path.name for path in (folder / "saved").iterdir()):
            reader = newest(folder / "saved" / source)
            assert trainer.load_state(reader) == []
            saw[f"from_{source}"] = steps(trainer, reader.step, MORE_STEPS)
        if name == job["chain"]:
            run = folder / "run"
            first = 0
            if run.exists():
                reader = newest(run)
                trainer.load_state(reader)
                first = reader.step
            else:  # from the beginning, whatever this trainer has done
                trainer.close()
                trainer = make_trainer(fields)
            saw["chain"] = steps(trainer, first, MORE_STEPS)
            save(trainer, run, first + MORE_STEPS)
        if not job["saves"] and name == "single":  # the same run on one device alone
            trainer.close()
            trainer = make_trainer(fields)
            saw["whole"] = steps(trainer, 0, 4 * MORE_STEPS)
            trainer.close()
            trainer = make_trainer(fields)
            trainer.load_state(newest(folder / "saved" / name), weights_only=True)
            saw["weights_only"] = steps(trainer, SAVED_STEPS, MORE_STEPS)
        if trainer.rank == 0:
            kind = "saves" if job["saves"] else "again"
            np.savez(folder / f"{kind}_{name}.npz", **saw)
            print(name, len(saw), flush=True)
        trainer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
