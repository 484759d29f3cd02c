"""Peaks that MFU divides by, found by what a driver calls the GPU."""

import pytest

from tfbig.gpu_peaks import data_sheet_peak
from tfbig.planner.cluster import load_constants, make_device


@pytest.mark.parametrize(
    ("name", "precision", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312),
        ("NVIDIA L4", "bfloat16", 121),
        ("NVIDIA L40S", "bfloat16", 362),
        ("NVIDIA L40", "float32", 90),
        ("NVIDIA B200", "bfloat16", 2250),
        ("Tesla V100-SXM2-16GB", "float16", 125),
        ("Tesla V100-SXM2-16GB", "bfloat16", 15.7),
        ("Tesla T4", "bfloat16", 8.1),
        ("NVIDIA A10", "float32", 62),
        ("NVIDIA GB200", "bfloat16", 0),
        ("NVIDIA A10G", "bfloat16", 0),
        ("NVIDIA GeForce RTX 4090", "bfloat16", 0),
    ],
)
def test_peaks_by_the_drivers_name(name, precision, teraflops):
    assert data_sheet_peak(name, precision) == teraflops * 1e12


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("Tesla V100-SXM2-32GB", "v100-32"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA L4", "l4"),
        ("Tesla T4", "t4"),
    ],
)
def test_the_planner_counts_with_the_same_peaks(name, device):
    row = make_device(load_constants(), device)
    for precision in ("bfloat16", "float16", "float32"):
        assert data_sheet_peak(name, precision) == row.peak_flops(precision), precision
