"""Training steps of tfbig and its peers, of the same shapes, in one run; a table, then the bars.

usage: python -m benchmarks.train [--quick] [--rows=TEXT] [--peer_python=PATH]... [--json=PATH]

Each side trains in a process of its own (benchmarks/train_peers.py), and all take turns: medians of
steps count, CPU seconds stand beside wall seconds, peaks are those of the processes. A peer needs
its packages in this interpreter or in one that --peer_python names (repeat it for more): torch and
transformers, or keras-hub. An absent peer is skipped, and so is one whose steps take minutes.
--rows measures only rows whose name has TEXT in it, of shapes and dtypes as of the rest.

Bars of other commands: benchmarks/start_up.py (first step, --help), profiler.py (what measuring
adds to a step), generate.py, attention.py.
"""

import argparse
import json
import os
import queue
import re
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.train_peers import Shape
from tfbig.config import ModelConfig, flops_per_token

ROOT = Path(__file__).parents[1]
WORKER = ROOT / "benchmarks" / "train_peers.py"
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
OURS = ("tfbig", "tfbig_compiled")
LIMITS = ("matmul", "torch_matmul")
# (name, what it needs installed)
SIDES = {
    "tfbig": "tensorflow",
    "tfbig_compiled": "tensorflow",
    "keras_hub": "keras_hub",
    "hugging_face": "transformers",
    "hugging_face_compiled": "transformers",
    "blog": "tensorflow",
    "matmul": "tensorflow",
    "torch_matmul": "torch",
}


class Row(NamedTuple):
    """A shape that all sides train."""

    name: str
    shape: Shape
    turns: int
    steps: int  # of a turn
    stays: bool  # whether processes live from turn to turn, all at a time
    speed_bars: dict[str, float]  # times the best peer, by dtype


def _shape(size: str, length: int, rows: int) -> Shape:
    layers, width, heads, vocabulary = {
        "0.4M": (2, 128, 4, 512),
        "13.9M": (6, 384, 6, 8192),
        "124M": (12, 768, 12, 50257),
    }[size]
    return Shape(layers, width, heads, vocabulary, length, rows, "", CORES)


_USUAL, _LONG = {"fp32": 1.1, "bf16": 1.25}, {"fp32": 1.2, "bf16": 1.2}
ROWS = (
    Row("13.9M, T 256, B 8", _shape("13.9M", 256, 8), 5, 3, True, _USUAL),
    Row("124M, T 512, B 2", _shape("124M", 512, 2), 3, 1, False, _USUAL),
    Row("124M, T 1024, B 2", _shape("124M", 1024, 2), 3, 1, False, _USUAL),
    Row("13.9M, T 4096, B 1", _shape("13.9M", 4096, 1), 3, 1, True, _LONG),
)
QUICK_ROWS = (Row("0.4M, T 128, B 4", _shape("0.4M", 128, 4), 2, 3, True, _USUAL),)
QUICK_SIDES = ("tfbig", "keras_hub", "hugging_face", "matmul")
LIMIT_BARS = {"fp32": 0.92, "bf16": 0.75}
MEMORY_ROW, MEMORY_BAR = "124M, T 1024, B 2", 0.6
HOROVOD_BAR = 0.95


@dataclass
class Result:
    """What a side did in a row, or why it did not."""

    side: str
    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    flops: list[float] = field(default_factory=list)  # of LIMITS
    peak: int = 0  # bytes
    device: dict[str, Any] = field(default_factory=dict)  # of "tfbig": name and peak
    skipped: str = ""

    def tokens_per_second(self, shape: Shape) -> float:
        """Returns the rate by the median step."""
        return shape.rows * shape.length / statistics.median(self.seconds)


class Side:
    """The process of one side and its answers."""

    def __init__(self, python: str, name: str, shape: Shape) -> None:
        command = [python, str(WORKER), name, json.dumps(shape._asdict())]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(shape.num_threads),
        )
        self._errors: list[str] = []
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        for read in (self._read_answers, self._read_errors):
            threading.Thread(target=read, daemon=True).start()

    def _read_answers(self) -> None:
        for line in self._process.stdout or ():
            if line.startswith("@"):
                self._answers.put(json.loads(line[1:]))
        self._answers.put(None)

    def _read_errors(self) -> None:
        for line in self._process.stderr or ():
            self._errors = [*self._errors[-20:], line.rstrip()]

    def answer(self, limit: float) -> dict[str, Any] | str:
        """Returns the next answer, or why there is none within `limit` seconds."""
        try:
            answer = self._answers.get(timeout=limit)
        except queue.Empty:
            return f"no answer in {limit:.0f} s"
        if answer is None:
            self._process.wait(30)
            return next((line for line in reversed(self._errors) if line.strip()), "it ended")
        return answer

    def steps(self, count: int, limit: float) -> dict[str, Any] | str:
        """Returns what `count` more steps took, or why nothing is known."""
        try:
            print(count, file=self._process.stdin, flush=True)
        except BrokenPipeError:
            return "it ended"
        return self.answer(limit)

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait(30)


def environment(num_threads: int) -> dict[str, str]:
    """Returns the environment of a side that uses so many threads."""
    return os.environ | {
        "OMP_NUM_THREADS": str(num_threads),
        "TF_NUM_INTRAOP_THREADS": str(num_threads),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",  # several processes share a GPU
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }


def interpreters(others: Sequence[str]) -> dict[str, str]:
    """Returns the interpreter that has each package which SIDES names."""
    found: dict[str, str] = {}
    packages = sorted(set(SIDES.values()))
    code = f"import importlib.util as u; print(*[n for n in {packages} if u.find_spec(n)])"
    for python in (sys.executable, *others):
        if not os.access(python, os.X_OK):
            sys.exit(f"benchmarks.train: error: --peer_python={python} is no program")
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=120)
        for name in done.stdout.split():
            found.setdefault(name, python)
    return found


def measure_row(
    row: Row, dtype: str, sides: Sequence[str], pythons: dict[str, str], limit: float
) -> dict[str, Result]:
    """Returns each side's result; they take turns."""
    shape = row.shape._replace(dtype=DTYPES[dtype])
    results = {name: Result(name) for name in sides}
    for name, result in results.items():
        if SIDES[name] not in pythons:
            result.skipped = f"{SIDES[name]} is not installed"
    alive: dict[str, Side] = {}
    try:
        for _ in range(row.turns):
            for name, result in results.items():
                if not result.skipped:
                    python = pythons[SIDES[name]]
                    result.skipped = _turn(alive, python, shape, row, result, limit)
                if name in alive and (result.skipped or not row.stays):
                    alive.pop(name).close()
    finally:
        for side in alive.values():
            side.close()
    return results


def _turn(
    alive: dict[str, Side], python: str, shape: Shape, row: Row, result: Result, limit: float
) -> str:
    """Makes one turn's steps; returns why it could not, or nothing."""
    name = result.side
    if name not in alive:
        alive[name] = Side(python, name, shape)
        built = alive[name].answer(limit)
        if isinstance(built, str):
            return built
        result.device = built.get("device", {})
    answer = alive[name].steps(row.steps, limit)
    if isinstance(answer, str):
        return answer
    result.seconds += answer["seconds"]
    result.cpu.append(answer["cpu"])
    result.flops += answer["results"] if name in LIMITS else []
    result.peak = max(result.peak, answer["peak"])
    return ""


def print_table(name: str, shape: Shape, results: dict[str, Result]) -> None:
    """Prints a line a side."""
    print(f"\n{name}: {'':<22}{'tokens/s':>9}{'CPU s a step':>14}{'peak MB':>9}")
    for side, result in results.items():
        if result.skipped:
            print(f"  {side:<24}skipped: {result.skipped[:100].replace('|', '/')}")
        elif side in LIMITS:
            rate = statistics.median(result.flops)
            reach = rate / flops_per_token(model_of(shape), shape.length)
            print(f"  {side:<24}{reach:>9.0f}   at {rate / 1e9:.0f} GFLOP/s", flush=True)
        else:
            cpu = statistics.median(result.cpu)
            rate = result.tokens_per_second(shape)
            print(f"  {side:<24}{rate:>9.0f}{cpu:>14.2f}{result.peak / 1e6:>9.0f}", flush=True)


def model_of(shape: Shape) -> ModelConfig:
    """Returns the model whose FLOPs count."""
    return ModelConfig(
        vocab_size=shape.vocab_size,
        max_length=shape.length,
        embed_dim=shape.embed_dim,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
    )


def bar(name: str, sign: str, wanted: float, measured: float | None, why: str = "") -> str:
    """Returns a bar's line.

    >>> bar("speed", ">=", 1.1, 1.2)
    'speed | >= 1.1 | 1.20 | yes'
    """
    if measured is None:
        return f"{name} | {sign} {wanted:g} | {why} | skipped"
    met = measured >= wanted if sign == ">=" else measured <= wanted
    return f"{name} | {sign} {wanted:g} | {measured:.2f} | {'yes' if met else 'no'}"


def row_bars(row: Row, dtype: str, results: dict[str, Result]) -> Iterator[str]:
    """Yields the bars of one row."""
    done = {name: result for name, result in results.items() if not result.skipped}
    name = f"{row.name}, {dtype}"
    rates = {k: r.tokens_per_second(row.shape) for k, r in done.items() if k not in LIMITS}
    ours = max((rates[k] for k in OURS if k in rates), default=None)
    peers = {k: rate for k, rate in rates.items() if k not in OURS}
    best = max(peers, key=peers.__getitem__, default=None)
    ratio = ours / peers[best] if ours and best else None
    title = f"{name}: tokens/s against the best peer" + (f", {best}" if best else "")
    yield bar(title, ">=", row.speed_bars[dtype], ratio, "no peer was measured")
    limits = [statistics.median(done[k].flops) for k in LIMITS if k in done]
    per_token = flops_per_token(model_of(row.shape), row.shape.length)
    share = ours * per_token / max(limits) if ours and limits else None
    yield bar(f"{name}: share of the matmul limit", ">=", LIMIT_BARS[dtype], share, "not measured")
    if row.name == MEMORY_ROW:
        held = {k: done[k].peak for k in rates}
        own = [held[k] for k in OURS if k in held]
        least = [held[k] for k in peers]
        ratio = min(own) / min(least) if own and least else None
        yield bar(f"{name}: peak memory / best peer's", "<=", MEMORY_BAR, ratio, "no peer")


def memory_growth(pythons: dict[str, str], limit: float) -> str:
    """Returns the bar of memory as the sample grows.

    Differences between lengths, as what TensorFlow itself takes is in each peak. Twice the slope
    would be a square's.
    """
    peaks = {}
    for length in (1024, 2048, 4096, 8192):
        shape = _shape("13.9M", length, 1)._replace(dtype="float32")
        side = Side(pythons["tensorflow"], "tfbig", shape)
        built, answer = side.answer(limit), side.steps(1, limit)
        side.close()
        if isinstance(built, str) or isinstance(answer, str):
            why = built if isinstance(built, str) else answer
            return bar(f"memory growth, T {length}", "<=", 1.1, None, str(why).replace("|", "/"))
        peaks[length] = answer["peak"]
        print(f"13.9M, T {length}, B 1: peak {answer['peak'] / 1e6:.0f} MB", flush=True)
    slope = (peaks[8192] - peaks[4096]) / (peaks[2048] - peaks[1024]) / 4
    name = "bytes a token from T 4096 to 8192 / from 1024 to 2048, 13.9M, fp32"
    return bar(name, "<=", 1.1, slope)


def horovod_pair(shape: Shape, turns: int, steps: int, limit: float) -> str:
    """Returns the bar of one process a core under Horovod against one process on all cores."""
    shape = shape._replace(dtype="float32")
    name = f"Horovod {CORES} x 1 core against 1 x {CORES} cores"
    if CORES < 2:
        return bar(name, ">=", HOROVOD_BAR, None, "one core")
    seconds: dict[str, list[float]] = {"tfbig": [], "tfbig_horovod": []}
    for _ in range(turns):
        for side in seconds:
            many = side == "tfbig_horovod"
            own = shape._replace(num_threads=1 if many else CORES)
            command = [sys.executable, str(WORKER), side, json.dumps(own._asdict()), str(steps)]
            if many:
                horovodrun = str(Path(sys.executable).with_name("horovodrun"))
                command = [horovodrun, "-np", str(CORES), *command]
            try:
                done = subprocess.run(
                    command,
                    capture_output=True,
                    text=True,
                    timeout=limit,
                    env=environment(own.num_threads),
                )
            except (subprocess.TimeoutExpired, FileNotFoundError) as error:
                return bar(name, ">=", HOROVOD_BAR, None, type(error).__name__)
            answers = map(json.loads, re.findall(r"@(\{.*\})", done.stdout))
            steps_made = [answer["seconds"] for answer in answers if "seconds" in answer]
            if not steps_made:
                return bar(name, ">=", HOROVOD_BAR, None, "it failed")
            seconds[side] += max(steps_made, key=sum)
    one, many = (statistics.median(seconds[side]) for side in seconds)
    return bar(name, ">=", HOROVOD_BAR, one / many)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the command's options."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small shape, under a minute")
    parser.add_argument("--rows", default="", help="only rows whose name has this in it")
    parser.add_argument("--peer_python", action="append", default=[], help="has peers' packages")
    parser.add_argument("--json", default="", help="file for all numbers")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds a turn may take")
    parser.add_argument(
        "--turns", type=int, default=0, help="turns of each side; 0: as the row has"
    )
    return parser.parse_args(arguments)


def main() -> None:
    """Prints the table, then one line a bar."""
    options = parse()
    pythons = interpreters(options.peer_python)
    quick = options.quick
    rows = QUICK_ROWS if quick else ROWS
    sides = [name for name in SIDES if not quick or name in QUICK_SIDES]
    lines: list[str] = []
    records: list[dict[str, Any]] = []
    for row in rows:
        if options.turns:
            row = row._replace(turns=options.turns)
        for dtype in DTYPES if not quick else ("fp32",):
            name = f"{row.name}, {dtype}"
            if options.rows not in name:
                continue
            results = measure_row(row, dtype, sides, pythons, options.patience)
            print_table(name, row.shape, results)
            lines += row_bars(row, dtype, results)
            shape = row.shape._replace(dtype=DTYPES[dtype])._asdict()
            measured = [asdict(result) for result in results.values()]
            records.append({"row": name, "shape": shape, "results": measured})
    if not quick and options.rows in "memory growth":
        lines.append(memory_growth(pythons, options.patience))
    if not quick and options.rows in "horovod":
        lines.append(horovod_pair(ROWS[0].shape, 3, 5, options.patience))
    print("\n" + "\n".join(lines))
    if options.json:
        text = json.dumps({"cores": CORES, "rows": records, "bars": lines}, indent=1)
        Path(options.json).write_text(text + "\n")


if __name__ == "__main__":
    main()
