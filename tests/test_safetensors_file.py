import hashlib
import os

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from tfbig import safetensors_file
from tfbig.rectangle import Rectangle
from tfbig.safetensors_file import TensorToWrite, read_header, read_rectangle, write_tensors


def write(path, arrays):
    tensors = [TensorToWrite(key, a.dtype, a.shape, a) for key, a in arrays.items()]
    return write_tensors(path, tensors, {"made by": "a test"})


def arrays_of_all_kinds():
    return {
        "flag": np.array(True),
        "bytes": np.arange(7, dtype=np.uint8),
        "half": np.arange(6, dtype=np.float16).reshape(2, 3),
        "brain": np.arange(5).astype(ml_dtypes.bfloat16),
        "matrix": np.arange(12, dtype=np.float32).reshape(3, 4),
        "transposed": np.arange(12, dtype=np.float32).reshape(3, 4).T,
        "empty": np.zeros((0, 3), np.float32),
        "scalar": np.array(2**40, np.int64),
        "double": np.array([np.nan, np.inf, 1.0]),
    }


def test_the_library_reads_what_we_write_and_the_digest_is_the_files(tmp_path):
    path, arrays = tmp_path / "a.safetensors", arrays_of_all_kinds()
    digest = write(path, arrays)
    contents = path.read_bytes()
    assert digest.sha256 == hashlib.sha256(contents).hexdigest()
    assert digest.num_bytes == len(contents)
    loaded = safetensors.numpy.load_file(path)
    assert set(loaded) == set(arrays)
    for key, array in arrays.items():
        assert loaded[key].dtype == array.dtype
        np.testing.assert_array_equal(loaded[key], array)


def test_we_read_what_the_library_writes(tmp_path):
    path, arrays = tmp_path / "a.safetensors", arrays_of_all_kinds()
    arrays = {
        key: np.ascontiguousarray(array).reshape(array.shape) for key, array in arrays.items()
    }
    safetensors.numpy.save_file(arrays, path)
    with open(path, "rb") as file:
        header = read_header(file.fileno())
        for key, array in arrays.items():
            out = np.empty(array.shape, array.dtype)
            whole = Rectangle((0,) * array.ndim, array.shape)
            read_rectangle(file.fileno(), header[key], whole, out)
            np.testing.assert_array_equal(out, array)


def test_every_tensor_is_aligned(tmp_path):
    write(tmp_path / "a", arrays_of_all_kinds())
    with open(tmp_path / "a", "rb") as file:
        for tensor in read_header(file.fileno()).values():
            assert tensor.offset % tensor.dtype.itemsize == 0


def test_a_big_endian_array_is_stored_as_the_format_wants(tmp_path):
    array = np.arange(5, dtype=">f4")
    write_tensors(tmp_path / "a", [TensorToWrite("x", np.dtype("f4"), (5,), array)], {})
    np.testing.assert_array_equal(safetensors.numpy.load_file(tmp_path / "a")["x"], array)


def test_an_array_is_made_when_its_turn_comes_and_freed_after(tmp_path):
    alive, most = set(), 0

    class Tracked(np.ndarray):
        def __del__(self):
            alive.discard(id(self))

    class OnDemand:
        def __array__(self, dtype=None, copy=None):
            nonlocal most
            array = np.zeros(1000, np.float32).view(Tracked)
            alive.add(id(array))
            most = max(most, len(alive))
            return array

    dtype = np.dtype(np.float32)
    tensors = [TensorToWrite(str(i), dtype, (1000,), OnDemand()) for i in range(5)]
    write_tensors(tmp_path / "a", tensors, {})
    assert tensors == []
    assert most == 1


def test_an_existing_file_is_never_written_to(tmp_path):
    (tmp_path / "a").write_bytes(b"precious")
    with pytest.raises(FileExistsError):
        write(tmp_path / "a", arrays_of_all_kinds())
    assert (tmp_path / "a").read_bytes() == b"precious"


def test_a_file_that_could_not_be_finished_is_removed(tmp_path):
    wrong = TensorToWrite("x", np.dtype("f4"), (5,), np.zeros(4, "f4"))
    with pytest.raises(AssertionError, match=r"x was announced as float32 \(5,\)"):
        write_tensors(tmp_path / "a", [wrong], {})
    assert list(tmp_path.iterdir()) == []


@st.composite
def tensors_and_rectangles(draw):
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=0, max_size=4)))
    start = tuple(draw(st.integers(0, size - 1)) for size in shape)
    extent = tuple(
        draw(st.integers(0, size - first)) for size, first in zip(shape, start, strict=True)
    )
    # From "every run is long" to "no two rows fit the buffer": all ways of reading.
    return (
        shape,
        Rectangle(start, extent),
        draw(st.sampled_from([1, 16, 1000])),
        draw(st.sampled_from([1, 24, 100, 10000])),
    )


@settings(deadline=None, max_examples=150)
@given(tensors_and_rectangles())
def test_any_rectangle_reads_as_numpy_indexes_it(tmp_path_factory, case):
    shape, wanted, short_run_bytes, read_bytes = case
    path = tmp_path_factory.getbasetemp() / "rectangles"
    path.unlink(missing_ok=True)
    array = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    write(path, {"before": np.arange(3.0), "x": np.asarray(array)})
    with pytest.MonkeyPatch.context() as patch, open(path, "rb") as file:
        patch.setattr(safetensors_file, "_SHORT_RUN_BYTES", short_run_bytes)
        patch.setattr(safetensors_file, "_READ_BYTES", read_bytes)
        tensor = read_header(file.fileno())["x"]
        # A strided target, as a part of a larger array is.
        big = np.full([2 * size for size in wanted.shape], np.nan, np.float32)
        for out in (np.empty(wanted.shape, np.float32), big[tuple(slice(n) for n in wanted.shape)]):
            if wanted.shape == ():
                out = np.empty((), np.float32)
            read_rectangle(file.fileno(), tensor, wanted, out)
            np.testing.assert_array_equal(out, array[wanted.slices])


def test_short_runs_are_read_by_the_row_and_long_ones_alone(tmp_path, monkeypatch):
    array = np.zeros((64, 4, 65536), np.float32)
    write(tmp_path / "a", {"x": array})
    reads = []
    real = os.preadv

    def counted(descriptor, buffers, offset):
        reads.append(sum(len(buffer) for buffer in buffers))
        return real(descriptor, buffers, offset)

    with open(tmp_path / "a", "rb") as file:
        tensor = read_header(file.fileno())["x"]
        monkeypatch.setattr(os, "preadv", counted)
        read_rectangle(
            file.fileno(),
            tensor,
            Rectangle((0, 1, 0), (64, 1, 65536)),
            np.empty((64, 1, 65536), "f4"),
        )
        assert reads == [65536 * 4] * 64  # a quarter of the tensor, no more
        reads.clear()
        read_rectangle(
            file.fileno(), tensor, Rectangle((0, 0, 8), (64, 4, 2)), np.empty((64, 4, 2), "f4")
        )
        assert reads == [32 * 1024 * 1024] * 2


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:5], "ends before its header"),
        (lambda data: b"\xff" * 8 + data[8:], "no safetensors header"),
        (lambda data: data[:8] + b"[" + data[9:], "header is damaged"),
        (lambda data: data.replace(b'"F32"', b'"F99"'), "header is damaged"),
        (lambda data: data.replace(b"[0,48]", b"[0,40]"), "contradict each other"),
        (lambda data: data[:-1], "ends before the last byte of x"),
    ],
)
def test_a_damaged_file_is_refused_with_what_is_wrong(tmp_path, damage, message):
    write(tmp_path / "a", {"x": np.zeros((3, 4), np.float32)})
    (tmp_path / "b").write_bytes(damage((tmp_path / "a").read_bytes()))
    with open(tmp_path / "b", "rb") as file, pytest.raises(ValueError, match=message):
        read_header(file.fileno())


def test_a_dtype_the_format_lacks_is_refused():
    with pytest.raises(ValueError, match="cannot store dtype complex64"):
        safetensors_file.dtype_of("complex64")
