"""Verifies layouts in one process of a launch, whole ones and ones with a fault put in.

usage: verify_worker.py OUTPUT CASES_JSON

A case is {"name", "fields" (of Config), "fault"}. What rank 0 is told goes into OUTPUT/NAME.txt.
"""

import dataclasses
import json
import os
import sys
from pathlib import Path

from tfbig.command import quiet_tensorflow

quiet_tensorflow()

import tensorflow as tf  # noqa: E402

from tests.distributed.parity_worker import break_on_purpose  # noqa: E402
from tfbig.config import Config, replace_fields  # noqa: E402
from tfbig.verify import VerificationError, verify  # noqa: E402

DROPOUT = {"dropout": 0.1, "attention_dropout": 0.1, "embedding_dropout": 0.1}


def put_in(trainer, fault: str) -> None:
    """Puts a fault into a built trainer, before its step is traced."""
    if fault == "other_weights":
        variable = trainer._variables["transformer_blocks/1/ffn/down/kernel"]
        variable.assign(variable * (1.0 + 0.01 * trainer.rank))
    elif fault == "local_sample_index":  # dropout then repeats its masks on every rank
        plain = trainer._gradients

        def gradients(batch, *arguments):
            rows = tf.range(tf.shape(batch["sample_index"])[0])
            return plain({**batch, "sample_index": tf.cast(rows, tf.int64)}, *arguments)

        trainer._gradients = gradients
    elif fault == "no_clipping":
        optimizer = dataclasses.replace(trainer.config.optimizer, clip_norm=0.0)
        trainer.config = dataclasses.replace(trainer.config, optimizer=optimizer)
    elif fault == "lost_on_load":  # a weight stays what it was
        load, variable = trainer.load_state, trainer._variables["transformer_blocks/1/ffn/up/bias"]

        def load_state(reader):
            value = variable.numpy()
            load(reader)
            variable.assign(value)

        trainer.load_state = load_state
    else:
        break_on_purpose(trainer, fault)


def main() -> None:
    output, cases = Path(sys.argv[1]), json.loads(sys.argv[2])
    for case in cases:
        fields = {"global_batch": 8, "run_dir": str(output / case["name"]), **DROPOUT}
        config = replace_fields(Config(), fields | case["fields"])
        try:
            fault = case["fault"]
            found = verify(config, lambda trainer, fault=fault: put_in(trainer, fault))
            lines = [comparison.line() for comparison in found]
        except VerificationError as error:
            lines = [f"failed: {error}"]
        if os.environ["HOROVOD_RANK"] == "0":
            (output / f"{case['name']}.txt").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
