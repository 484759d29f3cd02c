"""What a script's step gets and returns: arguments cut into microbatches, outputs put together."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfbig.errors import UserError
from trainers.keras_calls import restore_lost_calls
from trainers.object_messages import decode, encode
from trainers.smp_inputs import StepInputs
from trainers.smp_output import StepOutput

PARTS = [np.array([[1.0, 2.0]]), np.array([[3.0, 6.0]])]


@pytest.fixture
def output() -> StepOutput:
    return StepOutput([tf.constant(part) for part in PARTS])


def test_the_ways_to_put_an_output_together(output):
    np.testing.assert_array_equal(output.outputs[1], PARTS[1])
    np.testing.assert_array_equal(output.reduce_mean(), [[2, 4]])
    np.testing.assert_array_equal(output.reduce_sum(), [[4, 8]])
    np.testing.assert_array_equal(output.concat(), [[1, 2], [3, 6]])
    np.testing.assert_array_equal(output.merge(), output.concat())
    np.testing.assert_array_equal(output.stack(), np.stack(PARTS))
    losses = StepOutput([tf.constant(1.0), tf.constant(2.0)])
    np.testing.assert_array_equal(losses.concat(), [1, 2])


@pytest.mark.parametrize("method", ["variable", "add_n", "accumulate_n"])
def test_accumulate_gives_the_mean_and_fills_a_variable(output, method):
    taken = tf.Variable(tf.zeros([1, 2], tf.float64))
    np.testing.assert_array_equal(output.accumulate(method, taken), [[2, 4]])
    np.testing.assert_array_equal(taken, [[2, 4]])


def test_accumulate_knows_three_methods(output):
    with pytest.raises(UserError, match=r"accumulate\(method='sum'\): methods are variable"):
        output.accumulate("sum")


class Rows:
    """Something that a script slices itself."""

    def __init__(self, values: tf.Tensor, name: str) -> None:
        self.values, self.name = values, name

    def smp_slice(self, num_mb: int, mb: int, axis: int) -> "Rows":
        return Rows(tf.split(self.values, num_mb, axis)[mb] + 100.0, f"{self.name} {axis}")


def body(x, pair, rows, scale, flag=True):
    return x, pair, rows, scale, flag


def make_inputs(length: int = 4, **options) -> StepInputs:
    x = tf.reshape(tf.range(2 * length), [length, 2])
    pair = {"columns": np.arange(8).reshape(2, 4)}
    rows = Rows(tf.constant([1.0, 2.0]), "rows")
    split = {"non_split": ("scale",), "axes": {"pair": 1}} | options
    return StepInputs(body, (x, pair, rows), {"scale": tf.constant([5, 6, 7])}, 2, **split)


def test_arguments_are_cut_as_a_step_says():
    inputs = make_inputs()
    x, pair, rows, scale, flag = inputs.call(body, inputs.parts[1])
    np.testing.assert_array_equal(x, [[4, 5], [6, 7]])
    np.testing.assert_array_equal(pair["columns"], [[2, 3], [6, 7]])
    np.testing.assert_array_equal(rows.values, [102])
    assert isinstance(rows, Rows) and rows.name == "rows 0"
    np.testing.assert_array_equal(scale, [5, 6, 7])
    assert flag is True
    first = inputs.call(body, inputs.parts[0])
    np.testing.assert_array_equal(first[0], [[0, 1], [2, 3]])
    np.testing.assert_array_equal(first[2].values, [101])


def test_an_object_that_is_not_to_be_cut_stays_whole():
    inputs = make_inputs(non_split=("scale", "rows"))
    for part in inputs.parts:
        rows = inputs.call(body, part)[2]
        np.testing.assert_array_equal(rows.values, [1, 2])
        assert isinstance(rows, Rows) and rows.name == "rows"


def test_one_trace_serves_calls_of_the_same_shapes_and_constants():
    assert make_inputs().key == make_inputs().key != make_inputs(8).key


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"axes": {"pear": 1}}, "smp.step: body has no argument pear"),
        ({"non_split": ()}, r"argument scale has 3 rows, .*\(3 = 2 x 1 \+ 1\)"),
        ({"axes": {"x": 2}}, r"argument x of shape \(4, 2\) has no axis 2"),
    ],
)
def test_what_cannot_be_cut_is_named(options, words):
    with pytest.raises(UserError, match=words):
        make_inputs(**options)


def test_objects_travel_without_pickles():
    sent = {"a": (1, 2.5, None, "x", [True]), 3: {"b", "c"}, "bytes": b"\x00\xff"}
    assert decode(encode(sent)) == sent
    array = decode(encode({"array": np.arange(6, dtype=np.int16).reshape(2, 3)}))["array"]
    np.testing.assert_array_equal(array, np.arange(6).reshape(2, 3))
    assert array.dtype == np.int16
    with pytest.raises(UserError, match="a function cannot be sent between ranks"):
        encode(body)


def test_an_optimizer_has_the_calls_that_keras_3_lost():
    restore_lost_calls()
    optimizer, weight = keras.optimizers.SGD(0.5), keras.Variable([1.0, 2.0])

    @tf.function
    def gradients() -> list[tf.Tensor]:
        return optimizer.get_gradients(tf.reduce_sum(weight.value**2), [weight])

    np.testing.assert_array_equal(gradients()[0], [2, 4])
    optimizer.apply_gradients([(gradients()[0], weight)])
    np.testing.assert_array_equal(weight.numpy(), [0, 0])
    assert optimizer.variables() == list(optimizer.variables) != []
