"""Operator tables of captured steps by xprof, where it is installed (`pip install xprof`).

`python -m tfbig.profiler.xprof_operators FILE` prints one as JSON: xprof runs in a process of its
own, as it says much on stderr and writes files beside what it reads.
"""

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import orjson

_SECONDS = 120.0
_MOST = 20
_COLUMNS = ("host_or_device", "type", "operation", "occurrences", "total_self_time")


def is_installed() -> bool:
    """Returns whether xprof is there."""
    return importlib.util.find_spec("xprof") is not None


def xprof_operators(capture: Path) -> list[list[Any]]:
    """Returns the costliest operations of a capture, as xprof has them.

    Args:
      capture: an XPlane file.

    Returns:
      Rows of host or device, type, name, runs, milliseconds of self time; [] where xprof is not
      installed or cannot read the file, of which it says a line.
    """
    if not is_installed():
        return []
    command = [sys.executable, "-m", "tfbig.profiler.xprof_operators", str(capture.resolve())]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_SECONDS, check=True)
        return orjson.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, orjson.JSONDecodeError) as error:
        print(f"warning: xprof does not read {capture}: {error}", file=sys.stderr, flush=True)
        return []


def rows_of(tables: list[dict[str, Any]]) -> list[list[Any]]:
    """Returns the costliest rows of xprof's framework_op_stats, the times in milliseconds."""
    # The first table counts idle time as an operation, the second one does not.
    table = tables[-1]
    names = [column["id"] for column in table["cols"]]
    chosen = [names.index(name) for name in _COLUMNS]
    rows = [[row["c"][index]["v"] for index in chosen] for row in table["rows"]]
    rows.sort(key=lambda row: -row[-1])
    return [[*row[:-1], row[-1] / 1000] for row in rows[:_MOST]]


def main() -> None:
    """Prints the operations of the capture that the first argument names."""
    from xprof.convert import raw_to_tool_data

    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "host.xplane.pb"
        copy.write_bytes(Path(sys.argv[1]).read_bytes())
        data, _ = raw_to_tool_data.xspace_to_tool_data([str(copy)], "framework_op_stats", {})
    sys.stdout.buffer.write(orjson.dumps(rows_of(orjson.loads(data))))


if __name__ == "__main__":
    main()
