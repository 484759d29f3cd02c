"""Dense peaks of GPUs by their drivers' names, from the makers' data sheets. TensorFlow-free."""

import re

# FLOP/s by precision: bfloat16, float16, float32 (TF32 where there is one). V100 and T4 multiply
# bfloat16 as float32: their matrix units know float16 alone.
_PEAKS = {
    "B300": (2250e12, 2250e12, 1100e12),
    "B200": (2250e12, 2250e12, 1100e12),
    "H200": (989e12, 989e12, 494e12),
    "H100": (989e12, 989e12, 494e12),
    "A100": (312e12, 312e12, 156e12),
    "V100": (15.7e12, 125e12, 15.7e12),
    "L40S": (362e12, 362e12, 183e12),
    "L40": (181e12, 181e12, 90e12),
    "L4": (121e12, 121e12, 60e12),
    "T4": (8.1e12, 65e12, 8.1e12),
    "A10": (125e12, 125e12, 62e12),
}
_PRECISIONS = ("bfloat16", "float16", "float32")


def data_sheet_peak(name: str, precision: str) -> float:
    """Returns the FLOP/s of a GPU at its best, 0 of one that is not known.

    Args:
      name: as its driver says it.
      precision: "float32", "bfloat16" or "float16".

    >>> data_sheet_peak("NVIDIA L40S", "bfloat16")
    362000000000000.0
    """
    for model, peaks in _PEAKS.items():
        if re.search(rf"\b{model}\b", name):
            return peaks[_PRECISIONS.index(precision)]
    return 0.0
