"""A run that cannot fit is refused before it builds anything, with changes after which it fits."""

import pytest

from tfbig import presets
from tfbig.config import Config, replace_fields
from tfbig.errors import UserError
from tfbig.planner import at_start
from tfbig.planner.at_start import check_memory, free_host_bytes, request_at_start, shortfall
from tfbig.planner.changes import cheapest_changes, difference
from tfbig.planner.memory import HOST_COPIES, Overhead, peak, predict_memory


class Engine:
    """What check_memory needs of a trainer."""

    def __init__(self, num_replicas: int = 1, data_size: int = 1) -> None:
        self.num_replicas, self.data_size = num_replicas, data_size

    def agree(self, value: int, op: str) -> int:
        assert op == "min"
        return value


def gpt2(**fields: object) -> Config:
    values = {"strategy": "horovod", "global_batch": 16, "attention": "plain"}
    return replace_fields(presets.preset("gpt2_124m"), values | fields)


def needed(config: Config, data_size: int) -> float:
    return peak(predict_memory(config, data_size)).total


def test_what_fits_is_told_by_part():
    lines = check_memory(gpt2(), Engine(4, 4), device_bytes=1 << 40)
    assert len(lines) == 1
    assert "weights 0.50, gradients" in lines[0] and "1,099.5 GB there" in lines[0]


def test_what_cannot_fit_is_refused_with_three_changes_that_do():
    config = gpt2()
    there = 0.6 * needed(config, 4)
    with pytest.raises(UserError, match="on its fullest rank") as refused:
        check_memory(config, Engine(4, 4), device_bytes=int(there))
    assert "\n" not in str(refused.value)
    changes = str(refused.value).partition("cheapest first: ")[2].rstrip(".").split("; ")
    assert len(changes) == 3
    for change in changes:
        fields: dict[str, object] = {}
        for flag in change.split():
            name, _, value = flag.removeprefix("--").partition("=")
            fields[name] = int(value) if value.isdigit() else value or True
        assert needed(replace_fields(config, fields), 4) <= there, change


def test_nothing_is_advised_that_the_strategy_refuses():
    for strategy, degree in (("single", 1), ("pipeline", 2), ("mirrored", 1)):
        config = gpt2(strategy=strategy, pipeline_parallel_degree=degree)
        for there in (0.8, 0.5, 0.2):
            request, _ = request_at_start(config, 4, there * needed(config, 4), Overhead(), "")
            for change in cheapest_changes(request, 5):
                after = change.plan.request.config.parallel
                assert change.plan.fits and difference(request, change.plan.request) == change.text
                assert "shard_gradients" not in change.text or after.pipeline_parallel_degree == 1
                assert after.strategy in ("horovod", "pipeline") or "shard" not in change.text


def test_a_bit_too_much_is_let_through_and_replicas_of_a_process_count(monkeypatch):
    config = gpt2(strategy="mirrored")
    each = needed(config, 2)
    check_memory(config, Engine(2, 1), device_bytes=int(each / 1.05))  # each has a GPU
    monkeypatch.setattr(at_start, "free_host_bytes", lambda: int(3 * each))
    check_memory(config, Engine(2, 2), device_bytes=0)
    monkeypatch.setattr(at_start, "free_host_bytes", lambda: int(1.5 * each))
    with pytest.raises(UserError, match="on its fullest rank"):
        check_memory(config, Engine(2, 1), device_bytes=0)


def test_on_a_host_what_is_offloaded_stays_and_is_not_advised(monkeypatch):
    moved = gpt2(shard_optimizer_state=True, offload_optimizer_state=True, sequence_length=64)
    host = Overhead(copies=HOST_COPIES)
    kept = replace_fields(moved, {"offload_optimizer_state": False})
    more, less = (peak(predict_memory(one, 1, overhead=host)).total for one in (kept, moved))
    monkeypatch.setattr(at_start, "free_host_bytes", lambda: int(more / 1.2))
    assert less < more / 1.2
    with pytest.raises(UserError, match="on its fullest rank") as refused:
        check_memory(moved, Engine(1, 1), device_bytes=0)
    assert "offload" not in str(refused.value)
    request, _ = request_at_start(kept, 1, more / 1.2, host, "")
    assert all("offload" not in change.text for change in cheapest_changes(request, 50))
    check_memory(moved, Engine(1, 1), device_bytes=int(more / 1.2))


def test_hopeless_cases_are_told_to_take_more_ranks():
    assert "take more devices" in shortfall(gpt2(), 2, 1e6)


def test_a_containers_limit_counts(tmp_path):
    (tmp_path / "memory.max").write_text(str(3 << 30))
    (tmp_path / "memory.current").write_text(str(1 << 30))
    assert free_host_bytes(tmp_path) <= 2 << 30
    (tmp_path / "memory.current").write_text(str(4 << 30))
    assert free_host_bytes(tmp_path) == 0
