"""Prints, for each case of a launch, the bytes of the variables that a trainer makes on each rank.

usage: state_worker.py OUTPUT CASES_JSON

A case is {"name", "fields" (of Config), "model" (of ModelConfig)}.
"""

import gc
import json
import sys
from pathlib import Path

from tfbig.command import quiet_tensorflow

quiet_tensorflow()

import tensorflow as tf  # noqa: E402

import trainers  # noqa: E402
from tfbig.config import Config, ModelConfig, replace_fields  # noqa: E402


def variables() -> dict[int, tf.Variable]:
    """Returns all variables that this process holds, by identity."""
    gc.collect()
    return {id(one): one for one in gc.get_objects() if isinstance(one, tf.Variable)}


def variable_bytes(case: dict) -> dict[str, int]:
    """Builds a case's trainer and returns the bytes of what that made."""
    config = replace_fields(Config(model=ModelConfig(**case["model"])), case["fields"])
    before = variables()
    trainer = trainers.trainer_class(config.parallel.strategy)(config)
    trainer.build()
    made = [one for key, one in variables().items() if key not in before]
    # A variable may have several Python objects: its handle is one.
    handles = {one.handle._id: one for one in made if one.shape.rank}
    total = sum(one.shape.num_elements() * one.dtype.size for one in handles.values())
    saw = {"rank": trainer.rank, "data_size": trainer.data_size, "bytes": total}
    trainer.barrier(60)
    trainer.close()
    return saw


def main() -> None:
    output, cases = Path(sys.argv[1]), json.loads(sys.argv[2])
    for case in cases:
        saw = variable_bytes(case)
        (output / f"{case['name']}_{saw['rank']}.json").write_text(json.dumps(saw))


if __name__ == "__main__":
    main()
