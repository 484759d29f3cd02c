"""Horovod's build for GPUs, compiled and linked where there is none: CUDA's compiler from PyPI."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.distributed.launch import REPOSITORY

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(
        not os.environ.get("TFBIG_GPU_BUILD_TESTS"), reason="TFBIG_GPU_BUILD_TESTS=1: long"
    ),
]
# TensorFlow's wheel for GPUs without CUDA's libraries: it runs on CPUs, and Horovod links to it.
PACKAGES = [
    f"tensorflow=={version('tensorflow-cpu')}",
    *("cmake", "setuptools", "wheel", "cloudpickle", "psutil", "pyyaml", "packaging", "absl-py"),
    *("nvidia-cuda-nvcc", "nvidia-cuda-runtime", "nvidia-cuda-cccl", "nvidia-nccl-cu13"),
]


def run(command: list, seconds: float, **environment: str) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def link(folder: Path, name: str, target: str) -> None:
    """Gives a library of a PyPI package the name that linkers look for."""
    if not (folder / name).exists():
        (folder / name).symlink_to(target)


def test_it_links_and_names_no_symbol_that_tensorflow_lacks(tmp_path):
    run([sys.executable, "-m", "venv", tmp_path / "venv"], 300)
    python = tmp_path / "venv/bin/python"
    run([python, "-m", "pip", "install", "-q", "pip>=24.2"], 600)
    run([python, "-m", "pip", "install", "-q", *PACKAGES], 1800)
    (nvidia,) = (tmp_path / "venv/lib").glob("python3*/site-packages/nvidia")
    toolkit, nccl = nvidia / "cu13", nvidia / "nccl"
    link(toolkit / "lib", "libcudart.so", "libcudart.so.13")
    link(toolkit, "lib64", "lib")
    link(nccl / "lib", "libnccl.so", "libnccl.so.2")
    output = run(
        [python, "-m", "tfbig.install_horovod"],
        3600,
        PATH=f"{tmp_path}/venv/bin:{toolkit}/bin:{os.environ['PATH']}",
        PYTHONPATH=str(REPOSITORY),
        TFBIG_CACHE=str(tmp_path / "cache"),
        HOROVOD_GPU="CUDA",
        HOROVOD_GPU_OPERATIONS="NCCL",
        HOROVOD_NCCL_LINK="SHARED",
        HOROVOD_NCCL_HOME=str(nccl),
        HOROVOD_CUDA_HOME=str(toolkit),
        HOROVOD_BUILD_CUDA_CC_LIST="90",
    )
    assert "works" in output.splitlines()[-1], output
    build = run([tmp_path / "venv/bin/horovodrun", "--check-build"], 120)
    assert "[X] NCCL" in build and "[X] TensorFlow" in build, build
    (library,) = nvidia.parent.glob("horovod/tensorflow/mpi_lib*.so")
    undefined = run(["nm", "-D", "--undefined-only", library], 60)
    assert "ncclAllReduce" in undefined and "stream_executor" not in undefined
