"""What this machine could do at best: the peak that MFU divides by, and memory used."""

import resource
import sys
import time

import tensorflow as tf

from tfbig.gpu_peaks import data_sheet_peak


def peak_flops(precision: str) -> tuple[float, str]:
    """Returns (FLOP/s, where the number comes from) of the devices this process uses.

    A GPU's peak is its data sheet's; a CPU's is measured, as the best of a few large matrix
    products on the threads this process has.

    Args:
      precision: "float32", "bfloat16" or "float16".
    """
    gpus = tf.config.get_visible_devices("GPU")
    for gpu in gpus:
        name = tf.config.experimental.get_device_details(gpu).get("device_name", "")
        if peak := data_sheet_peak(name, precision):
            return len(gpus) * peak, f"data sheet of {name}"
        return 0.0, f"unknown for {name}"
    return _measured_peak(tf.as_dtype(precision)), "measured matrix product"


def _measured_peak(dtype: tf.DType, size: int = 1024, repeats: int = 6) -> float:
    left = tf.cast(tf.random.stateless_normal([size, size], [1, 2]), dtype)
    product = tf.function(lambda a, b: tf.reduce_max(tf.matmul(a, b)), autograph=False)
    product(left, left)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        product(left, left).numpy()
        best = min(best, time.perf_counter() - start)
    return 2.0 * size**3 / best


def gpu_memory_bytes() -> int:
    """Returns what TensorFlow may take of this process's smallest GPU; 0 without one."""
    from tensorflow.python.client import device_lib  # no public call gives it

    if not tf.config.get_visible_devices("GPU"):
        return 0
    devices = device_lib.list_local_devices()
    return min(device.memory_limit for device in devices if device.device_type == "GPU")


def steps_overlap() -> bool:
    """Returns whether a call of a step returns before the step is done, as on a GPU."""
    return bool(tf.config.get_visible_devices("GPU"))


def peak_memory_bytes() -> int:
    """Returns the most memory this process has used: of its GPU if it has one, else resident."""
    if tf.config.get_visible_devices("GPU"):
        return int(tf.config.experimental.get_memory_info("GPU:0")["peak"])
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
