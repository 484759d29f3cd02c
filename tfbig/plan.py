"""Predicts memory, time and price of a run: `python -m tfbig.plan --preset=gpt3_175b ...`."""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tfbig import presets
from tfbig.command import run_command
from tfbig.errors import UserError
from tfbig.flags import Flags
from tfbig.planner.changes import shortfall
from tfbig.planner.layout import make_plan
from tfbig.planner.plan_config import PlanConfig
from tfbig.planner.question import request_of, run_sections
from tfbig.planner.report import describe, explanation, launch_command, ranking, to_dict
from tfbig.planner.search import best_plans

COMMON_FLAGS = (
    "cluster best explain json chart check measure constants microbatch_size tokens software"
    " preset global_batch sequence_length precision pipeline_parallel_degree"
    " tensor_parallel_degree microbatches pipeline sequence_parallel shard_optimizer_state"
    " activation_checkpointing"
).split()


def run(values: Mapping[str, Any]) -> int:
    """Answers one question.

    Args:
      values: flags by name; those not given take their defaults.

    Raises:
      UserError: the layout is none that train runs, or it doesn't fit.
    """
    plan_config = PlanConfig(
        **{name: value for name, value in values.items() if hasattr(PlanConfig, name)}
    )
    if plan_config.measure:
        from tfbig.planner.measure import measure_to

        return measure_to(plan_config.constants)
    if plan_config.check:
        from tfbig.planner.check import check_run

        print(check_run(plan_config.check, plan_config.constants, values.get("cluster", "")))
        return 0
    request = request_of(values)
    if plan_config.chart:
        from tfbig.planner.chart import write_chart

        print(f"chart written to {write_chart(request, plan_config.chart)}")
        return 0
    if plan_config.best:
        plans, looked_at = best_plans(request)
        plan, text = plans[0], ranking(plans[: plan_config.show], looked_at)
    else:
        plans, text = [plan := make_plan(request)], ""
    if plan_config.json:
        answers = [to_dict(p) for p in plans[: plan_config.show]]
        print(json.dumps(answers if plan_config.best else answers[0]))
    else:
        print("\n\n".join(filter(None, [text, describe(plan)])))
        if request.software.name == "tfbig" and plan.fits:
            print(f"\n{launch_command(plan)}")
        if plan_config.explain:
            print(f"\n{explanation(plan)}")
    if not plan.fits:
        raise UserError(shortfall(plan))
    return 0


def _body(arguments: Sequence[str]) -> int:
    flags = Flags(
        "plan",
        [PlanConfig, *run_sections()],
        "predicts memory, time and price of a run before it costs money.",
        COMMON_FLAGS,
        presets.default_values(),
    )
    return run(flags.parse(arguments))


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command and exits."""
    run_command("plan", _body, sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    main()
