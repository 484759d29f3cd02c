"""Pipelines against the formula and against one core: real ranks, real messages.

usage: python benchmarks/parallel.py [--quick]

Two stages train a model on two cores, one each; `single` trains the same on one of them, turn and
turn about, so that whatever else the machine does falls on both. For the case that has a bar, both
cores train `single` at once, too: two cores that share caches and memory do less than twice one
core's work, and two stages can't do more. Four ranks, more than this needs cores, exchange real
messages between stages that only sleep: their waiting is the bubble.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
EFFICIENCY_BAR, BAR_MICROBATCHES = 0.8, 8  # of twice the speed of one core, two stages
BUBBLE_BAR = 0.05  # distance of measured from formula
# Seconds of a forward pass; a backward takes twice that. An exchange costs a fixed time, some
# milliseconds with four ranks on two cores, which each line states: the bubble is the schedule's
# where a pass takes much longer than that, as it does for models that need a pipeline.
SLEEP = 0.4
SLEEPING_CASES = (("1f1b", 4, 1), ("1f1b", 8, 1), ("simple", 8, 1), ("interleaved", 8, 2))


def pin_to_one_core() -> None:
    """Gives this process one core and one thread; before TensorFlow starts."""
    cores = sorted(os.sched_getaffinity(0))
    rank = int(os.environ.get("HOROVOD_LOCAL_RANK", "0"))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    os.environ["OMP_NUM_THREADS"] = "1"


def timed(trainer, batch: dict, step: int) -> float:
    """Returns the seconds of one training step."""
    start = time.perf_counter()
    trainer.train_step(batch, step, 1e-3, 0.0, 0).loss_sum.numpy()
    return time.perf_counter() - start


def measure_two_stages(quick: bool) -> None:
    """Times two stages and, on rank 0, one core alone; prints the medians as JSON."""
    from tfbig.config import Config, replace_fields
    from tfbig.planner.measure_steps import make_batch
    from trainers.pipeline import PipelineTrainer
    from trainers.single import SingleTrainer

    length, rows, rounds = (32, 2, 3) if quick else (128, 4, 5)
    shape = {"embed_dim": 64, "num_layers": 4} if quick else {"embed_dim": 256, "num_layers": 8}
    for microbatches in (4, 8, 16):
        fields = {
            "global_batch": rows * microbatches,
            "microbatches": microbatches,
            "sequence_length": length,
            "max_length": length,
            "vocab_size": 1024,
            "num_heads": 4,
            "num_threads": 1,
            **shape,
        }
        base = replace_fields(Config(), fields)
        batch = make_batch(base, rows * microbatches)
        degree = {"strategy": "pipeline", "pipeline_parallel_degree": 2, "memory_weight": 0.0}
        pipeline = PipelineTrainer(replace_fields(base, degree))
        pipeline.build()
        singles = {}
        both = microbatches == BAR_MICROBATCHES
        if pipeline.rank == 0 or both:
            for count in (1, microbatches):  # one core may be faster with or without accumulation
                singles[count] = SingleTrainer(replace_fields(base, {"microbatches": count}))
                singles[count].build()
        seconds: dict[str, list[float]] = {}
        stage_times, shares = [], []
        for step in range(rounds + 2):
            pipeline.barrier(600)
            wall = timed(pipeline, batch, step)
            own = sum(pipeline.pass_seconds().values()) / microbatches
            slowest = pipeline.agree(int(own * 1e6), "max") / 1e6
            in_flight = pipeline.timings()()
            measured = {"pipeline": wall}
            for count, trainer in singles.items() if pipeline.rank == 0 else ():
                measured[f"single_{count}"] = timed(trainer, batch, step)
            for count, trainer in singles.items() if both else ():
                pipeline.barrier(600)
                measured[f"together_{count}"] = timed(trainer, batch, step)
            if step >= 2:  # the first ones trace
                for name, value in measured.items():
                    seconds.setdefault(name, []).append(value)
                stage_times.append(slowest)
                shares.append({axis: value / wall for axis, value in in_flight.items()})
        if pipeline.rank == 0:
            result = {name: statistics.median(values) for name, values in seconds.items()}
            result |= {"microbatches": microbatches, "stage": statistics.median(stage_times)}
            result["shares"] = {a: statistics.median(s[a] for s in shares) for a in shares[0]}
            print("result " + json.dumps(result), flush=True)
        pipeline.barrier(600)
        pipeline.close()


class SleepingChunk:
    """Stands where a Chunk does; its passes take the time given and make real tensors.

    Args:
      seconds: of a forward pass; a backward takes twice as long.
      is_first: whether nothing comes before it, so that its backward passes nothing on.
      is_last: whether its forward ends in a loss.
      shape: of the hidden state.
    """

    def __init__(
        self, seconds: float, is_first: bool, is_last: bool, shape: tuple[int, ...]
    ) -> None:
        self.variables: dict = {}
        self._seconds, self._shape = seconds, shape
        self._is_first, self._is_last = is_first, is_last

    def begin(self, values=None) -> None: ...

    def end(self) -> None: ...

    def forward(self, hidden, *_):
        import tensorflow as tf

        from trainers.gradients import BatchSums

        time.sleep(self._seconds)
        if self._is_last:
            return BatchSums(*[tf.zeros([])] * 4)
        return tf.ones(self._shape) if hidden is None else hidden

    def backward(self, index, upstream):
        import tensorflow as tf

        time.sleep(2 * self._seconds)
        if self._is_first:
            return None
        return tf.ones(self._shape) if upstream is None else upstream


def measure_sleeping_stages(quick: bool) -> None:
    """Times four ranks whose stages sleep a fixed time; prints bubbles as JSON."""
    import tensorflow as tf

    from trainers.collectives import Engine
    from trainers.mesh import make_mesh, mesh_groups
    from trainers.pipeline_link import Link
    from trainers.pipeline_program import Exchange, plan_programs, simulated_seconds
    from trainers.pipeline_schedule import bubble_fraction, compute_order
    from trainers.pipeline_stepper import Stepper

    sleep, shape = (SLEEP / 4 if quick else SLEEP), (2, 64, 64)

    for schedule, microbatches, num_chunks in SLEEPING_CASES:
        mesh = make_mesh(4, 4, 1, "cluster")
        engine = Engine(mesh_groups(mesh, num_chunks > 1, False))
        links = {}
        for group in engine.groups:
            if group.axis == "pipeline" and group.rank >= 0:
                links[group.ranks[1 - group.rank]] = Link(group, tf.float32)
        orders = [compute_order(schedule, 4, r, microbatches, num_chunks) for r in range(4)]
        programs = plan_programs(orders, num_chunks)
        chunks = [
            SleepingChunk(
                sleep / num_chunks,
                is_first=engine.rank == 0 and chunk == 0,
                is_last=engine.rank == 3 and chunk == num_chunks - 1,
                shape=shape,
            )
            for chunk in range(num_chunks)
        ]
        stepper = Stepper(chunks, links)
        walls = []
        for _ in range(3):
            engine.barrier(600)
            start = time.perf_counter()
            stepper.run(programs[engine.rank], {}, tf.constant(0, tf.int64), shape, True)
            engine.barrier(600)
            walls.append(time.perf_counter() - start)
        if engine.rank == 0:
            ideal = microbatches * 3 * sleep
            beyond = min(walls[1:]) - simulated_seconds(programs) * sleep / num_chunks
            num_exchanges = sum(isinstance(action, Exchange) for action in programs[0].actions)
            result = {
                "schedule": schedule,
                "microbatches": microbatches,
                "measured": 1 - ideal / min(walls[1:]),
                "formula": bubble_fraction(4, microbatches, num_chunks),
                "exchange": beyond / num_exchanges,
            }
            print("result " + json.dumps(result), flush=True)
        engine.barrier(600)
        engine.close()


def launch(num_processes: int, part: str, quick: bool) -> list[dict]:
    """Returns the results that rank 0 of a launch prints."""
    command = [
        str(Path(sys.executable).with_name("horovodrun")),
        *("-np", str(num_processes), sys.executable, __file__, "--worker", part),
        *(["--quick"] if quick else []),
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=3000, env=environment)
    lines = [line for line in done.stdout.splitlines() if "result {" in line]
    if done.returncode or not lines:
        sys.exit(f"the benchmark's processes failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return [json.loads(line[line.index("{") :]) for line in lines]


def report_two_stages(results: list[dict]) -> None:
    """Prints one line for each number of microbatches."""
    for result in results:
        microbatches = result["microbatches"]
        ideal = (microbatches + 1) * result["stage"]
        single = min(value for name, value in result.items() if name.startswith("single_"))
        share = single / (2 * result["pipeline"])
        axes = ", ".join(f"{axis} {part:.1%}" for axis, part in sorted(result["shares"].items()))
        print(
            f"2 stages, m = {microbatches}: step {result['pipeline'] * 1e3:.0f} ms, (m + p - 1) x"
            f" stage time {ideal * 1e3:.0f} ms, ratio {result['pipeline'] / ideal:.3f};"
            f" collectives in flight: {axes}"
        )
        name = f"2 stages, m = {microbatches}: share of 2x one core"
        if microbatches == BAR_MICROBATCHES:
            together = min(value for name, value in result.items() if name.startswith("together_"))
            cores = single / together
            print(
                f"both cores at once do {cores:.3f} of twice one core's work: two stages could"
                f" reach {cores * microbatches / (microbatches + 1):.3f} at most"
            )
            met = "yes" if share >= EFFICIENCY_BAR else "no"
            print(f"{name} | at least {EFFICIENCY_BAR} | {share:.3f} | {met}")
        else:
            print(f"{name} {share:.3f}")


def report_sleeping_stages(results: list[dict]) -> None:
    """Prints one line for each schedule."""
    for result in results:
        distance = abs(result["measured"] - result["formula"])
        met = "yes" if distance <= BUBBLE_BAR else "no"
        case = f"4 ranks, {result['schedule']}, m = {result['microbatches']}"
        print(
            f"{case}: beyond the schedule {result['exchange'] * 1e3:.1f} ms an exchange of rank 0"
        )
        print(
            f"{case}: bubble measured {result['measured']:.3f}, formula {result['formula']:.3f}"
            f" | distance at most {BUBBLE_BAR} | {distance:.3f} | {met}"
        )


def main() -> None:
    """Runs both parts and prints one line a bar."""
    quick = "--quick" in sys.argv
    if "--worker" in sys.argv:
        part = sys.argv[sys.argv.index("--worker") + 1]
        if part == "two_stages":
            pin_to_one_core()
        from tfbig.command import quiet_tensorflow

        quiet_tensorflow()
        (measure_two_stages if part == "two_stages" else measure_sleeping_stages)(quick)
        return
    report_two_stages(launch(2, "two_stages", quick))
    report_sleeping_stages(launch(4, "sleeping_stages", quick))


if __name__ == "__main__":
    main()
