"""TensorBoard's files: scalars, histograms and text, read as TensorBoard reads them."""

import collections

import tensorflow as tf

from benchmarks.synthetic_run import SyntheticRun
from tfbig.profiler.rules.catalogue import look_at
from tfbig.profiler.run_data import read_run
from tfbig.profiler.tensorboard_text import rules_text


def summaries(folder) -> dict[str, dict[str, list]]:
    """Returns each tag's values (step, tensor) by plugin."""
    found: dict = collections.defaultdict(lambda: collections.defaultdict(list))
    for path in sorted(folder.glob("events.out.tfevents.*")):
        for record in tf.data.TFRecordDataset(str(path)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            for value in event.summary.value:
                plugin = value.metadata.plugin_data.plugin_name
                tensor = tf.make_ndarray(value.tensor)
                found[plugin][value.tag].append((event.step, tensor))
    return found


def test_a_runs_files_need_nothing_of_ours(measured_run):
    found = summaries(measured_run / "tensorboard")
    assert [step for step, _ in sorted(found["scalars"]["train/loss"])] == list(range(1, 31))
    kernel = found["histograms"]["weight/transformer_blocks/0/ffn/up/kernel"]
    assert sorted(step for step, _ in kernel) == [1, 5, 10, 15, 20, 25, 30]
    assert all(buckets[:, 2].sum() == 32 * 128 for _, buckets in kernel)
    texts = {
        tag: "\n".join(part.decode() for _, tensor in values for part in tensor.ravel())
        for tag, values in found["text"].items()
    }
    assert "| run | global_batch | 6 |" in texts["run/config"]
    assert "1. 30 steps of gpt_tiny by single on 1 rank" in texts["run/verdict"]
    assert [step for step, _ in found["text"]["run/verdict"]] == [12, 30]
    assert "run/rules" in texts


def test_rules_that_fired_are_a_table(tmp_path):
    run = SyntheticRun()
    assert rules_text(look_at(read_run(run.write(tmp_path / "healthy")))) == "No rule fired."
    run.data_wait[:] = 0.25 * run.seconds
    text = rules_text(look_at(read_run(run.write(tmp_path / "spoilt"))))
    assert "| DataWait | 25.0% of the steps' time" in text and "| --data_workers=4," in text
    assert "up to 25% of the steps' time |" in text
