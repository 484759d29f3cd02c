"""What must be so before a run begins: one folder for all ranks, a checkpoint of this run."""

import pytest

from tests.distributed.launch import horovodrun
from tfbig import train
from tfbig.config import replace_fields
from tfbig.errors import UserError
from tfbig.run_folder import RunFolder
from tfbig.run_state import check_resumable, identity
from tfbig.saved_run import SavedRun

# Each rank works in a folder of its own, as on hosts that share no file system.
WORKER = """
import os, sys
from tfbig.config import Config, replace_fields
from tfbig.errors import UserError
from tfbig.run_folder import RunFolder
from tfbig.run_state import check_shared
from tfbig.verify import verify
from trainers.horovod import HorovodTrainer
trainer = HorovodTrainer(Config())
os.chdir(os.path.join(sys.argv[1], str(trainer.rank)))
folder = RunFolder("run")
if trainer.rank == 0:
    folder.create()
try:
    check_shared(folder, trainer, patience=0.2)
except UserError as error:
    print(f"rank {trainer.rank}: {error}", flush=True)
trainer.agree(0, "max")
trainer.close()
config = replace_fields(Config(), {"run_dir": "run", "strategy": "horovod", "global_batch": 4})
try:
    verify(config)
except UserError as error:
    print(f"rank {trainer.rank} verifies: {error}", flush=True)
"""


@pytest.mark.distributed
def test_a_run_folder_that_the_hosts_do_not_share_is_refused_and_not_left(tmp_path):
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    done = horovodrun(2, [str(worker), str(tmp_path)], timeout=240)
    assert done.returncode == 0, done.stdout
    for rank in range(2):
        assert f"rank {rank}: rank 1 does not see run, which rank 0 made" in done.stdout
        assert (
            f"rank {rank} verifies: rank 1 does not see {tmp_path}/{rank}/run.verify" in done.stdout
        )
        assert not list((tmp_path / str(rank)).iterdir())


def test_a_rate_of_some_replicas_goes_on_with_as_many(tmp_path, small_flags):
    folder, flags = tmp_path / "run", [*small_flags, "--scale_learning_rate", "--eval_every=0"]
    for steps in (1, 2):
        assert train._body([*flags, f"--run_dir={folder}", f"--steps={steps}"]) == 0
    config = replace_fields(SavedRun.open(str(folder)).config, {"freeze": ()})  # as flags give it
    check_resumable(config, RunFolder(folder), 1)
    with pytest.raises(UserError, match=r"num_replicas: the checkpoint has 1, this run 2\."):
        check_resumable(config, RunFolder(folder), 2)
    plain = replace_fields(config, {"scale_learning_rate": False})
    assert identity(plain, {}, 1) == identity(plain, {}, 2), "else any number goes on"
