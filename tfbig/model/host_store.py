"""Tensors that wait in host memory between a forward and its backward pass."""

import tensorflow as tf

HOST = "/device:CPU:0"


def device_of(tensor: tf.Tensor) -> str:
    """Returns where a tensor of a graph is, or will be: the process's GPU where it has one."""
    if tensor.device:
        return tensor.device
    gpus = tf.config.list_logical_devices("GPU")
    return gpus[0].name if gpus else HOST


class HostStore:
    """Takes numbered tensors in ascending order and gives them back in descending order.

    A transfer back begins when the tensor `horizon` places above it is asked for, so that it runs
    beside computation; before that, and after the forward pass has read it, a tensor takes no
    memory of the device. Source: SageMaker's model parallelism library calls the distance
    activation_loading_horizon (arXiv 2111.05972).

    Args:
      horizon: places.
    """

    def __init__(self, horizon: int) -> None:
        self._horizon = horizon
        self._stored: dict[int, tuple[tf.Tensor, str]] = {}
        self._loading: dict[int, tf.Tensor] = {}

    def put(self, index: int, tensor: tf.Tensor) -> None:
        """Sends a tensor to the host."""
        with tf.device(HOST):
            self._stored[index] = tf.identity(tensor), device_of(tensor)

    def get(self, index: int, after: tf.Tensor) -> tf.Tensor:
        """Returns a tensor on its device, and lets the following ones begin their way back.

        Args:
          index: of the tensor.
          after: what must be there before those begin.
        """
        for following in range(index, index - self._horizon - 1, -1):
            if following not in self._stored:
                continue
            tensor, device = self._stored.pop(following)
            with tf.control_dependencies([after]), tf.device(device):
                self._loading[following] = tf.identity(tensor)
        return self._loading.pop(index)
