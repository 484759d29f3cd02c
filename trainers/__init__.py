"""Strategy backends. The table below is the only place where a strategy's name is looked up."""

STRATEGIES = {
    "single": "trainers.single:SingleTrainer",
    "horovod": "trainers.by_sharding:horovod_trainer",
    "mirrored": "trainers.mirrored:MirroredTrainer",
    "multi_worker": "trainers.multi_worker:MultiWorkerTrainer",
    "pipeline": "trainers.by_sharding:pipeline_trainer",
}

# By strategy, what it can drive: one device, those of one host, or those of a cluster.
REACH = {
    "single": "device",
    "mirrored": "host",
    "multi_worker": "cluster",
    "horovod": "cluster",
    "pipeline": "cluster",
}

# By strategy, what of trainers/validate.py says whether it takes a configuration.
CHECKS = {
    "single": (
        "check_not_elastic",
        "check_data_parallel_only",
        "check_no_sharding",
        "check_one_device",
    ),
    "horovod": (
        "check_elastic_holds_all",
        "check_data_parallel_only",
        "check_one_device",
        "check_gradient_reduction",
    ),
    "mirrored": ("check_not_elastic", "check_data_parallel_only", "check_no_sharding"),
    "multi_worker": ("check_not_elastic", "check_data_parallel_only", "check_no_sharding"),
    "pipeline": ("check_not_elastic", "check_mesh_fits", "check_one_device"),
}


def check_strategy(config) -> None:
    """Checks, without TensorFlow, that a configuration's strategy takes it.

    Raises:
      UserError: as its trainer would.
    """
    from trainers import validate

    _check_name(config.parallel.strategy)
    for name in CHECKS[config.parallel.strategy]:
        getattr(validate, name)(config)


def _check_name(name: str) -> None:
    from tfbig.errors import UserError, near_matches

    if name not in STRATEGIES:
        raise UserError(
            f"--strategy={name} is not known.{near_matches(name, list(STRATEGIES))}"
            f" The strategies are: {', '.join(STRATEGIES)}."
        )


def trainer_class(name: str):
    """Returns what makes a strategy's Trainer of a Config.

    Raises:
      UserError: no strategy has that name.
    """
    import importlib

    _check_name(name)
    module, _, attribute = STRATEGIES[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def start(config):
    """Returns the Trainer of a Config, when its ranks are those that a launcher has started.

    Raises:
      UserError: no strategy has that name, it refuses the configuration, its world is smaller than
        the launcher's, or two ranks drive one GPU.
    """
    from trainers.start_check import check_start

    trainer = trainer_class(config.parallel.strategy)(config)
    across = [name for name, reach in REACH.items() if reach == "cluster"]
    advice = (
        f"--strategy={config.parallel.strategy} trains in one process: start one, or choose one of "
        f"{', '.join(across)} (docs/clusters.md)"
    )
    try:
        check_start(trainer, advice)
    except BaseException:
        trainer.close()
        raise
    return trainer
