"""The training command under horovodrun with the model cut over two ranks."""

import orjson
import pytest

from tests.distributed.launch import horovodrun

FLAGS = [
    "--strategy=pipeline",
    "--pipeline_parallel_degree=2",
    "--microbatches=2",
    "--num_layers=3",
    "--steps=2",
]
# Trains with a flag that is not the same on all ranks.
UNEQUAL = (
    "import os, sys; from tfbig.train import main;"
    " main([*sys.argv[1:], '--seed=' + os.environ['HOROVOD_RANK']])"
)


@pytest.mark.distributed
def test_the_partition_is_printed_saved_and_can_be_given(tmp_path, small_flags):
    command = ["-m", "tfbig.train", *small_flags, *FLAGS, "--partition=2,1"]
    done = horovodrun(2, [*command, f"--run_dir={tmp_path / 'run'}"], timeout=240)
    assert done.returncode == 0, done.stdout
    assert "mesh data 1, pipeline 2, tensor 1; placement cluster" in done.stdout
    assert done.stdout.count("activation MB x in flight") == 1, "rank 0 alone prints it"
    layout = orjson.loads((tmp_path / "run/config.json").read_bytes())["layout"]
    assert layout["mesh"] == {"data": 1, "pipeline": 2, "tensor": 1}
    assert [stage["block_range"] for stage in layout["stages"]] == [[0, 2], [2, 3]]
    assert "bubble 33.3% of a step" in done.stdout and layout["bubble"] == 0.3333  # 1 / (2 + 2 - 1)


# Ends one training after another, each with its mistake, and goes on in the same processes.
MISTAKES = """
import os, sys
from tfbig.train import main
common, mistakes = sys.argv[1].split(), sys.argv[2:]
for mistake in mistakes:
    try:
        main([*common, *mistake.split()])
    except SystemExit as end:
        print("rank", os.environ["HOROVOD_RANK"], "ended with", end.code, flush=True)
"""


@pytest.mark.distributed
def test_layouts_that_cannot_be_are_one_line_of_rank_0(tmp_path, small_flags):
    mistakes = {
        "--pipeline_parallel_degree=3": "2 ranks are no multiple of",
        "--microbatches=4": "microbatches",
    }
    common = " ".join([*small_flags, *FLAGS, f"--run_dir={tmp_path / 'run'}"])
    done = horovodrun(2, ["-c", MISTAKES, common, *mistakes], timeout=240)
    lines = [line for line in done.stdout.splitlines() if "tfbig train:" in line]
    assert len(lines) == len(mistakes), done.stdout
    for line, words in zip(lines, mistakes.values(), strict=True):
        assert line.startswith("[0]<stderr>:") and words in line, line
    assert done.stdout.count("ended with 2") == 2 * len(mistakes)
    assert "Traceback" not in done.stdout and not (tmp_path / "run").exists()


@pytest.mark.distributed
@pytest.mark.parametrize("flags", [FLAGS, ["--strategy=horovod", "--steps=2"]])
def test_ranks_that_were_told_different_things_are_refused(tmp_path, small_flags, flags):
    arguments = ["-c", UNEQUAL, *small_flags, *flags, f"--run_dir={tmp_path / 'run'}"]
    done = horovodrun(2, arguments, timeout=240)
    assert done.returncode != 0
    ours = [line for line in done.stdout.splitlines() if "the ranks differ" in line]
    assert len(ours) == 1 and ours[0].startswith("[0]<stderr>:"), done.stdout
    assert "--seed" in ours[0] and "--embed_dim" not in ours[0]
    assert "Exit code: 2" in done.stdout and "Traceback" not in done.stdout
    assert not (tmp_path / "run").exists()
