"""What one rank's part of a checkpoint holds, and how the parts of all ranks make variables."""

from typing import Any

from tfbig.checkpoint_format import CheckpointError, Slice
from tfbig.rectangle import Rectangle, tiling_problem
from tfbig.safetensors_file import TensorToWrite


def describe_slices(
    slices: list[Slice], file_name: str
) -> tuple[dict[str, dict[str, Any]], list[TensorToWrite]]:
    """Turns a rank's slices into what its part's JSON says of them, and the tensors to write.

    Args:
        slices: all that the rank holds, written by it or not.
        file_name: of its part.

    Returns:
        Variables by path (shape, dtype, slices [file, key, start, shape]), and their tensors.

    Raises:
        CheckpointError: when the slices contradict each other.
    """
    variables: dict[str, dict[str, Any]] = {}
    tensors = []
    for part in slices:
        shape = tuple(map(int, part.global_shape))
        variable = variables.setdefault(part.path, {"shape": shape, "dtype": None, "slices": []})
        if variable["shape"] != shape:
            raise CheckpointError(
                f"{part.path}: one rank gives the shapes {variable['shape']} and {shape}"
            )
        if not part.is_writer:
            continue
        rectangle, dtype = part.rectangle, part.dtype
        if variable["dtype"] not in (None, dtype.name):
            raise CheckpointError(
                f"{part.path}: one rank gives the dtypes {variable['dtype']} and {dtype.name}"
            )
        variable["dtype"] = dtype.name
        if 0 in rectangle.shape:
            continue
        assert "#" not in part.path, f"{part.path}: # marks the slices of a variable in a file"
        index = len(variable["slices"])
        key = f"{part.path}#{index}" if index else part.path
        entry = {"key": key, "start": rectangle.start, "shape": rectangle.shape}
        variable["slices"].append({"file": file_name, **entry})
        tensors.append(TensorToWrite(key, dtype, rectangle.shape, part.array))
    return variables, tensors


def merge_variables(step: int, parts: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Merges the variables of all parts into the manifest's.

    Args:
        step: of the checkpoint, for messages.
        parts: the JSON of every rank's part, by rank.

    Returns:
        Variables by path, sorted.

    Raises:
        CheckpointError: when ranks contradict each other, or their slices don't tile a variable
            exactly once; it names the variable.
    """
    variables: dict[str, dict[str, Any]] = {}
    for rank, part in enumerate(parts):
        for path, found in part["variables"].items():
            merged = variables.setdefault(
                path, {"shape": found["shape"], "dtype": found["dtype"], "slices": []}
            )
            merged["dtype"] = merged["dtype"] or found["dtype"]
            for name in ("shape", "dtype"):
                if found[name] is not None and found[name] != merged[name]:
                    raise CheckpointError(
                        f"checkpoint of step {step} not saved: {path} has {name} {found[name]} "
                        f"on rank {rank}, but {merged[name]} on ranks before it"
                    )
            merged["slices"].extend(found["slices"])
    for path, variable in variables.items():
        slices = variable["slices"]
        problem = tiling_problem(
            variable["shape"],
            [Rectangle(tuple(entry["start"]), tuple(entry["shape"])) for entry in slices],
            [entry["file"] for entry in slices],
        )
        if problem or variable["dtype"] is None:
            raise CheckpointError(
                f"checkpoint of step {step} not saved: the slices the ranks wrote of {path}, "
                f"shape {tuple(variable['shape'])}, have {problem or 'no writer'}"
            )
    return dict(sorted(variables.items()))
