"""What the feed-forward layers' nonlinearities get: for the rules of dead and saturated units."""

from collections.abc import Mapping
from typing import Any

import numpy as np

# The input up to which a unit counts as inactive: there the slope is 0, or less than 0.001.
_INACTIVE = {"relu": 0.0, "gelu": -4.0, "gelu_tanh": -4.0}


def active_percentiles(inputs: np.ndarray, function: str) -> list[float]:
    """Returns the percentiles 0 to 100, over units, of the percent of inputs that move a unit.

    Args:
      inputs: (inputs, units), before the nonlinearity.
      function: its name.
    """
    active = 100 * (inputs > _INACTIVE[function]).mean(axis=0)  # (units,)
    return np.round(np.percentile(active, np.arange(101)), 2).tolist()


def activation_records(model: Any, batch: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns a record a block, of one forward pass of the batch's first row, without dropout.

    Args:
      model: whole, in this process.
      batch: as the step had it.
    """
    import tensorflow as tf

    from tfbig.model.context import make_context

    row = {name: value[:1] for name, value in batch.items()}
    context = make_context(row, tf.constant(0, tf.int64), training=False)
    seen: list[dict[str, Any]] = []
    layers = [block.ffn for block in model.transformer_blocks]

    def note(layer: Any, index: int, hidden: Any) -> None:
        inputs = tf.cast(hidden, tf.float32).numpy().reshape(-1, hidden.shape[-1])
        record = {"name": f"transformer_blocks/{index}/ffn", "kind": "activation"}
        percentiles = active_percentiles(inputs, layer.activation)
        seen.append({**record, "function": layer.activation, "active_percentiles": percentiles})

    for index, layer in enumerate(layers):
        layer.look = lambda hidden, layer=layer, index=index: note(layer, index, hidden)
    try:
        model.hidden_state(row["tokens"][:, :-1], context)
    finally:
        for layer in layers:
            layer.look = None
    return seen
