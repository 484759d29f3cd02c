"""Objects between ranks: numbers, texts, bytes, arrays, and lists, tuples and dicts of them.

They travel as JSON, and not as pickles, which run code where they are read.
"""

import base64
import json
from typing import Any

import numpy as np
import tensorflow as tf

from tfbig.errors import UserError
from trainers.collectives import Group
from trainers.script_session import session

TAG = "__kind__"


def encode(obj: Any) -> bytes:
    """Returns an object as bytes.

    Raises:
      UserError: it holds something that is none of the kinds above.

    >>> decode(encode({"a": (1, 2.5, None, "x", [True])}))
    {'a': (1, 2.5, None, 'x', [True])}
    """
    return json.dumps(_plain(obj)).encode()


def decode(data: bytes) -> Any:
    """Returns the object that `encode` made bytes of."""
    return _restored(json.loads(data.decode()))


def _plain(obj: Any) -> Any:
    if obj is None or isinstance(obj, (bool, int, float, str)):
        return obj
    if isinstance(obj, (np.generic, np.ndarray, tf.Tensor)):
        array = np.asarray(obj)
        data = base64.b64encode(array.tobytes()).decode()
        return {TAG: "array", "dtype": array.dtype.str, "shape": array.shape, "data": data}
    if isinstance(obj, bytes):
        return {TAG: "bytes", "data": base64.b64encode(obj).decode()}
    if isinstance(obj, list):
        return [_plain(item) for item in obj]
    if isinstance(obj, (tuple, set)):
        return {TAG: type(obj).__name__, "items": [_plain(item) for item in obj]}
    if isinstance(obj, dict):
        return {TAG: "dict", "items": [[_plain(k), _plain(v)] for k, v in obj.items()]}
    raise UserError(
        f"a {type(obj).__name__} cannot be sent between ranks: send numbers, texts, bytes, arrays,"
        " or lists, tuples, sets and dicts of them."
    )


def _restored(value: Any) -> Any:
    if isinstance(value, list):
        return [_restored(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value[TAG]
    if kind == "array":
        data = base64.b64decode(value["data"])
        return np.frombuffer(data, np.dtype(value["dtype"])).reshape(value["shape"]).copy()
    if kind == "bytes":
        return base64.b64decode(value["data"])
    if kind == "dict":
        return {_restored(key): _restored(item) for key, item in value["items"]}
    items = [_restored(item) for item in value["items"]]
    return tuple(items) if kind == "tuple" else set(items)


def _bytes_tensor(data: bytes) -> tf.Tensor:
    return tf.constant(np.frombuffer(data, np.uint8))


def broadcast_object_in(group: Group, obj: Any, root: int) -> Any:
    """Returns the object of a group's member number `root`, on every member.

    Args:
      group: all its members call.
      obj: the root's; others' don't matter.
      root: place in the group.
    """
    gathered = gather_objects(group, obj if group.rank == root else None)
    return gathered[root]


def gather_objects(group: Group, obj: Any) -> list[Any]:
    """Returns the objects of a group's members, in order."""
    if group.size == 1:
        return [decode(encode(obj))]
    own = encode(obj)
    with tf.init_scope():  # scripts call this while a function of theirs is traced

        def gather(value: tf.Tensor, name: str) -> tf.Tensor:
            return group.all_gather(value, name)

        kind = f"objects_{'_'.join(map(str, group.ranks))}"
        length = tf.constant([len(own)], tf.int64)
        lengths = session().in_graph(gather, length, kind, "lengths").numpy().tolist()
        # All send as many bytes: shapes under one name change as seldom as can be.
        width = 1 << max(8, max(lengths) - 1).bit_length()
        sent = _bytes_tensor(own.ljust(width, b" "))
        data = session().in_graph(gather, sent, kind, f"bytes_{width}").numpy().tobytes()
    parts = [data[i * width : i * width + length] for i, length in enumerate(lengths)]
    return [decode(part) for part in parts]
