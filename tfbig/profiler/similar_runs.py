"""Whether two runs' tensors are alike: SageMaker Debugger's SimilarAcrossRuns, which needs two."""

import math
from typing import Any

from tfbig.profiler.run_data import RunData

_STATISTICS = ("mean", "mean_abs", "std", "min", "max", "zero_fraction")
_TOLERANCE = 1e-5  # of the larger value


def _by_place(run: RunData) -> dict[tuple[str, str, int], dict[str, Any]]:
    kinds = ("weight", "gradient")
    return {(r["kind"], r["name"], r["step"]): r for r in run.tensors if r["kind"] in kinds}


def similarity(first: RunData, second: RunData) -> str:
    """Returns a line that says which tensors differ in their statistics; "" without any of both."""
    before, after = _by_place(first), _by_place(second)
    shared = sorted(before.keys() & after.keys(), key=lambda place: place[2])
    if not shared:
        return ""
    different = [place for place in shared if not _alike(before[place], after[place])]
    tensors = {place[:2] for place in shared}
    if not different:
        return f"SimilarAcrossRuns: {len(tensors)} tensors are alike at every step looked at."
    names = list(dict.fromkeys(place[1] for place in different))
    return (
        f"SimilarAcrossRuns: {len({place[:2] for place in different})} of {len(tensors)} tensors"
        f" differ, first at step {different[0][2]}: {', '.join(names[:4])}."
    )


def _alike(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return all(
        math.isclose(first[name], second[name], rel_tol=_TOLERANCE, abs_tol=1e-12)
        for name in _STATISTICS
    )
