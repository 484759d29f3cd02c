"""Trains a GPT: `python -m tfbig.train --strategy=horovod`, alone or under horovodrun."""

import contextlib
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfbig import presets, schedule
from tfbig.batch_memory import check_batch_memory
from tfbig.batches import evaluate_validation, filled_up, train_batches
from tfbig.command import EXIT_SIGNAL, is_launched, run_command
from tfbig.command_config import ListConfig
from tfbig.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    replace_fields,
    to_dict,
)
from tfbig.elastic.worlds import World, run_in_worlds
from tfbig.first_data import default_data_folder, open_data
from tfbig.flags import Flags
from tfbig.interop.initial_weights import model_fields, open_initial
from tfbig.loss_config import LossConfig
from tfbig.lost_host import lost_hosts_named
from tfbig.parallel_config import ParallelConfig
from tfbig.profile_config import ProfileConfig
from tfbig.robustness_config import RobustnessConfig
from tfbig.run_folder import RunFolder
from tfbig.run_folder_check import check_run_folder
from tfbig.stop_signal import StopSignal
from tfbig.together import Outcome, on_every_rank, together
from tfbig.validation import validate
from trainers import check_strategy

COMMON_FLAGS = (
    "preset list_presets data source strategy run_dir steps global_batch microbatches"
    " learning_rate precision eval_every checkpoint_every deterministic restart"
).split()


def run(config: Config, command: Sequence[str] = ()) -> int:
    """Trains `config`, resuming the run folder where it stands.

    Args:
      config: as `config_from` makes it.
      command: the command line, for the record.

    Returns:
      0 when all steps are made, 143 when a signal stopped the run after a save.
    """
    validate(config)
    if config.profile.stop_on_rule:
        from tfbig.profiler.rules.catalogue import check_names

        with on_every_rank(is_agreed=False):
            check_names(config.profile.stop_on_rule)
    check_strategy(config)
    return run_in_worlds(config, functools.partial(_run, command=command))


def _run(config: Config, world: World, command: Sequence[str]) -> int:
    seen_here = Outcome(lambda: look_around(config))
    if not is_launched():
        seen_here.alone()
    import trainers  # TensorFlow starts here, after the mistakes that need none of it

    trainers.trainer_class(config.parallel.strategy)  # or no strategy has that name
    if config.run.verify:
        print_verified(config, seen_here)
    world.meet()
    trainer = trainers.start(config)
    with contextlib.ExitStack() as held:
        held.callback(trainer.close)
        folder, initial = seen_here.of_all(trainer)
        config = world.settle(config, trainer)
        return _train(config, trainer, folder, initial, command, held, world)


def look_around(config: Config) -> tuple[RunFolder, Any]:
    """Returns the run's folder, not made yet, and the reader of the weights to start from.

    Raises:
      UserError: this host's files are not as the run needs them.
    """
    check_run_folder(config)
    return RunFolder(config.run.run_dir), open_initial(config)


def _train(
    config: Config,
    trainer: Any,
    folder: RunFolder,
    initial: Any,
    command: Sequence[str],
    held: contextlib.ExitStack,
    world: World,
) -> int:
    from tfbig.attention_trial import choose_attention
    from tfbig.hardware import gpu_memory_bytes
    from tfbig.profiler.profiling import measured
    from tfbig.run_start import make_run_folder, recent_losses, start_from
    from tfbig.run_state import StateKeeper, check_shared

    attention = choose_attention(config, trainer, gpu_memory_bytes())
    config = attention.config
    memory, data = check_and_open(config, folder, trainer)
    if config.robustness.replay_step:
        return _replay(config, trainer, folder, initial, data)

    # Run folder and the checkpoint to go on from.
    with on_every_rank():
        held.enter_context(make_run_folder(config, folder, trainer, world.lock_patience))
        check_shared(folder, trainer)
    pulse = _pulse(config, trainer, folder, held)
    keeper = held.enter_context(StateKeeper(config, folder, trainer, data.identity))
    reader, notes = world.find(trainer, keeper)

    # Model, optimizer, state.
    trainer.build(True, len(data.sources), data.vocab_size)
    progress = start_from(keeper, reader, initial, trainer)
    older = [f"checkpoint of {note}; an older one is used" for note in notes]
    if trainer.rank == 0:
        world.announce(folder, trainer)
        attention.write(folder)
    notes = [*attention.notes, *memory, *older]
    hooks, total_peak = _watch(config, trainer, folder, data, command, notes, held)

    # Steps.
    with (
        StopSignal() as stop_signal,
        measured(config, folder.profiler_dir, trainer, data.sources, stop_signal) as measuring,
    ):
        loop = _make_loop(
            config,
            trainer,
            data,
            keeper,
            [*world.hooks(), *measuring, *hooks],
            recent_losses(reader),
            total_peak,
            stop_signal,
            pulse,
        )
        with world.trained_in(trainer, loop) as owes_pause:
            reason = loop.run(progress, reader is not None, owes_pause)
    return EXIT_SIGNAL if reason == "signal" else 0


def _make_loop(
    config: Config,
    trainer: Any,
    data: Any,
    keeper: Any,
    hooks: Sequence[Any],
    losses: Sequence[Sequence[float]],
    total_peak: float,
    stop_signal: StopSignal,
    pulse: Any,
) -> Any:
    from tfbig.bad_samples import examine_step
    from tfbig.bad_steps import BadSteps
    from tfbig.loop import Loop
    from tfbig.metrics import Throughput

    return Loop(
        config=config,
        trainer=trainer,
        open_batches=functools.partial(train_batches, config, trainer, data),
        evaluate=lambda: evaluate_validation(config, trainer, data, stop_signal, pulse),
        saver=keeper,
        hooks=hooks,
        throughput=Throughput.of(config, total_peak),
        stop_signal=stop_signal,
        bad_steps=BadSteps(config, losses),
        examine=functools.partial(examine_step, config, trainer, data),
        reload=keeper.load_newest,
        pulse=pulse,
        sources=data.sources,
    )


def _pulse(config: Config, trainer: Any, folder: RunFolder, held: contextlib.ExitStack) -> Any:
    """Returns what the training thread tells the watchdog, which also knows hosts that are lost."""
    from tfbig.watchdog import Watchdog

    timeout = config.robustness.hang_timeout
    watchdog = held.enter_context(
        Watchdog(folder, trainer.rank, trainer.size, timeout, trainer.stalled)
    )
    held.enter_context(lost_hosts_named(watchdog.hosts))
    return watchdog.pulse


def _watch(
    config: Config,
    trainer: Any,
    folder: RunFolder,
    data: Any,
    command: Sequence[str],
    notes: Sequence[str],
    held: contextlib.ExitStack,
) -> tuple[list[Any], float]:
    """Introduces the run; returns the hooks that record and check it, and all devices' peak."""
    from tfbig.hardware import peak_flops
    from tfbig.replica_hook import ReplicaHook
    from tfbig.run_start import introduce

    peak, peak_source = peak_flops(config.parallel.precision)
    total_peak = 1e9 * trainer.agree(int(peak / 1e9), "sum")
    hooks: list[Any] = []
    if trainer.rank == 0:
        hooks = begin_record(config, trainer, folder, data, command, peak_source)
        introduce(config, trainer, data, total_peak, peak_source, notes)
    if every := config.robustness.check_replicas_every:
        hooks.append(ReplicaHook(trainer, every))
    for hook in hooks:
        held.callback(hook.close)
    return hooks, total_peak


def check_and_open(config: Config, folder: RunFolder, trainer: Any) -> tuple[list[str], Any]:
    """Returns what memory the run will take, a line a pipeline rank, and its data.

    Raises:
      UserError: on every rank, when it cannot fit, or the folder, the data or the batch do not.
    """
    from tfbig.hardware import gpu_memory_bytes, peak_flops
    from tfbig.interop.initial_weights import check_tokenizer
    from tfbig.planner.at_start import check_memory
    from tfbig.run_start import check_kept_run
    from trainers.validate import derive_microbatch_size

    rows, length = config.run.global_batch, config.data.sequence_length
    together(trainer, lambda: check_batch_memory("global_batch", rows, trainer.data_size, length))
    with on_every_rank():
        device_bytes = gpu_memory_bytes()
        device = peak_flops(config.parallel.precision)[1] if device_bytes else ""
        memory = check_memory(filled_up(config, trainer), trainer, device_bytes, device)
        for global_batch in () if config.robustness.elastic else schedule.batch_sizes(config.run):
            derive_microbatch_size(global_batch, trainer.num_replicas, config.parallel.microbatches)
    # Data may take an hour to prepare: the folder's mistakes come first.
    replicas = trainer.num_replicas
    together(
        trainer,
        lambda: check_kept_run(config, folder, replicas) if trainer.rank == 0 else None,
    )
    data = open_data(config, trainer)
    together(trainer, lambda: check_tokenizer(config.run.init_from, data))
    return memory, data


def begin_record(
    config: Config,
    trainer: Any,
    folder: RunFolder,
    data: Any,
    command: Sequence[str],
    peak_source: str,
) -> list[Any]:
    """Writes what the run is into its folder, on rank 0, and returns the hooks that go on."""
    from tfbig.durable_file import write_atomic
    from tfbig.hooks import main_rank_hooks
    from tfbig.planner.prediction import Machines
    from tfbig.planner.prediction_hook import PredictionHook
    from tfbig.profiler.place import host_place

    layout = trainer.layout()
    folder.write_config(to_dict(config), command, layout and layout.record)
    # The run's own copy: its readers need nothing else of the data folder.
    write_atomic(folder.tokenizer_path, data.tokenizer_path.read_bytes())
    num_devices = max(trainer.size, trainer.num_replicas)
    on_host = host_place().local_size * (num_devices // trainer.size)
    machines = Machines(num_devices, peak_source, min(on_host, num_devices))
    prediction = PredictionHook(filled_up(config, trainer), machines, Path(folder.path))
    return [*main_rank_hooks(config, folder), prediction]


def print_verified(config: Config, seen_here: Outcome) -> None:
    """Compares this layout with one device on a shrunken model; rank 0 prints the errors.

    Args:
      config: of the run.
      seen_here: what `look_around` found on this host.

    Raises:
      UserError: on every rank, what the run itself would be refused for.
      VerificationError: they differ.
    """
    from tfbig.verify import verify

    def check(trainer: Any) -> None:
        folder, _ = seen_here.of_all(trainer)
        check_and_open(config, folder, trainer)

    for comparison in verify(config, check=check):
        print(f"verify: {comparison.line()}", flush=True)


def _replay(config: Config, trainer: Any, folder: RunFolder, initial: Any, data: Any) -> int:
    from tfbig.replay import replay_step
    from tfbig.run_start import recent_losses, start_from
    from tfbig.run_state import StateKeeper

    keeper = StateKeeper(config, folder, trainer, data.identity)
    reader = keeper.find_before(config.robustness.replay_step)
    trainer.build(True, len(data.sources), data.vocab_size)
    progress = start_from(keeper, reader, initial, trainer)
    batches = functools.partial(train_batches, config, trainer, data)
    replay_step(config, trainer, data, progress, recent_losses(reader), batches)
    return 0


@on_every_rank(is_agreed=False)
def config_from(values: dict[str, Any]) -> Config:
    """Returns the configuration of the given flag values over their preset.

    Raises:
      UserError: no such preset or field.
    """
    config = presets.preset(values.get("preset", RunConfig.preset))
    config = replace_fields(config, model_fields(values.get("init_from", "")) | values)
    defaults = {}
    if not config.run.run_dir:
        defaults["run_dir"] = f"runs/{config.run.preset}"
    if not config.data.data:
        defaults["data"] = default_data_folder(config)
    return replace_fields(config, defaults)


def _body(arguments: Sequence[str]) -> int:
    sections = (
        ListConfig,
        RunConfig,
        DataConfig,
        ParallelConfig,
        RobustnessConfig,
        ProfileConfig,
        OptimizerConfig,
        LossConfig,
        ModelConfig,
    )
    summary = "trains a GPT, resuming where it stopped."
    flags = Flags("train", sections, summary, COMMON_FLAGS, presets.default_values())
    given = flags.parse(arguments)
    if given.pop("list_presets", False):
        print(presets.listing())
        return 0
    return run(config_from(given), ["tfbig.train", *arguments])


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command and exits."""
    run_command("train", _body, sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    main()
