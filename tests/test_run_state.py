"""What all ranks must see alike before a run begins."""

import pytest

from tests.distributed.launch import horovodrun

# Each rank works in a folder of its own, as on hosts that share no file system.
WORKER = """
import os, sys
from tfbig.config import Config
from tfbig.errors import UserError
from tfbig.run_folder import RunFolder
from tfbig.run_state import check_shared
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
"""


@pytest.mark.distributed
def test_a_run_folder_that_the_hosts_do_not_share_is_refused_and_not_left(tmp_path):
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    done = horovodrun(2, [str(worker), str(tmp_path)], timeout=120)
    assert done.returncode == 0, done.stdout
    for rank in range(2):
        assert f"rank {rank}: rank 1 does not see run, which rank 0 made" in done.stdout
        assert not list((tmp_path / str(rank)).iterdir())
