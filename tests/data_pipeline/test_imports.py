import subprocess
import sys

# All of the pipeline but the making of tf.data datasets runs where there is no TensorFlow.
PROGRAM = """
import importlib, pathlib, pkgutil, sys
sys.modules["tensorflow"] = sys.modules["keras"] = None
import numpy as np
import data_pipeline
names = [module.name for module in pkgutil.iter_modules(data_pipeline.__path__)]
for name in names:
    if name != "tfds_builder":  # the file that registers a dataset with TFDS
        importlib.import_module(f"data_pipeline.{name}")
importlib.import_module("tfbig.prepare")
from data_pipeline.dataset import TokenData
data = TokenData.open(sys.argv[1])
assert data.rows("train", np.arange(3), 0)["tokens"].shape == (3, data.sequence_length + 1)
assert not [name for name in sys.modules if name.startswith(("trainers", "tfbig.loop"))]
print(len(names))
"""


def test_the_pipeline_needs_no_tensorflow(data_folder):
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(data_folder)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) >= 11
