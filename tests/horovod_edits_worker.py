"""Started twice under horovodrun by test_install_horovod.py: what the edits to Horovod cure.

Each phase starts Horovod anew. Rank 0 writes what it saw to the folder given; rank 1 ends in the
last phase by its own SIGKILL.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import horovod.tensorflow as hvd
import tensorflow as tf

TENSOR = tf.ones([4])


def reduced(tensor: tf.Tensor, name: str) -> tf.Tensor:
    return hvd.allreduce(tensor, op=hvd.Sum, name=name)


@tf.function
def collectives(tensor: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    first, second = reduced(tensor, "equal_first"), reduced(tensor, "equal_second")
    reduced(tensor + 1, "unused")
    reduced(tf.ones([4]), "constant")
    return first, second


@tf.function
def lonely(tensor: tf.Tensor) -> tf.Tensor:
    return reduced(tensor, "lonely")


def write(folder: Path, name: str, value: object) -> None:
    temporary = folder / f"{name}.tmp"
    temporary.write_text(json.dumps(value))
    temporary.rename(folder / f"{name}.json")


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)


def every_collective_runs(folder: Path) -> None:
    os.environ["HOROVOD_TIMELINE"] = str(folder / "timeline.json")
    hvd.init()
    for _ in range(3):
        results = collectives(TENSOR)
    lonely(TENSOR)  # the timeline may lose the last events before a shutdown: these
    if hvd.rank() == 0:
        write(folder, "sums", [result.numpy().tolist() for result in results])
    hvd.shutdown()
    del os.environ["HOROVOD_TIMELINE"]


def stall_is_named(folder: Path) -> None:
    os.environ["HOROVOD_STALL_CHECK_TIME_SECONDS"] = "2"
    os.environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] = "4"
    hvd.init()
    lonely(TENSOR)  # both ranks are traced and ready
    if hvd.rank() == 0:
        try:
            lonely(TENSOR)
            write(folder, "stall", "no error")
        except tf.errors.UnknownError as error:
            write(folder, "stall", str(error))
    else:
        wait_for(folder / "stall.json")
    hvd.shutdown()
    os.environ["HOROVOD_STALL_CHECK_TIME_SECONDS"] = "60"
    os.environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] = "120"


def peer_death_is_an_exception(folder: Path) -> None:
    hvd.init(process_sets=[hvd.ProcessSet([0])])
    lonely(TENSOR)
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    # horovodrun ends the others as soon as it sees that; what they see is to be written first.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        lonely(TENSOR)
        write(folder, "death", "no error")
    except tf.errors.UnknownError as error:
        hvd.shutdown()
        write(folder, "death", str(error))


if __name__ == "__main__":
    results_folder = Path(sys.argv[1])
    every_collective_runs(results_folder)
    stall_is_named(results_folder)
    peer_death_is_an_exception(results_folder)
