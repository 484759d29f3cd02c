"""SageMaker's configuration of model parallelism: each of its names, and what it does here.

TensorFlow-free. Source of the names: the documentation of SageMaker's model-parallel library,
versions 1.1 to 1.15, and the checks of its SDK.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tfbig.errors import UserError, near_matches

# The launcher's configuration, as SageMaker's containers hand hyperparameters on.
ENVIRONMENT = "SM_HP_MP_PARAMETERS"
PYTORCH_ONLY = "SageMaker had it for PyTorch only, and a script's own layers cannot be cut so"

# Served: the field of Parameters that the name sets.
ACCEPTED = {
    "partitions": "partitions",
    "pipeline_parallel_degree": "partitions",
    "microbatches": "microbatches",
    "pipeline": "pipeline",
    "placement_strategy": "placement_strategy",
    "auto_partition": "auto_partition",
    "default_partition": "default_partition",
    "horovod": "horovod",
    "ddp": "horovod",
    "active_microbatches": "active_microbatches",
}
# Of no consequence here whatever their value, and why.
WITHOUT_EFFECT = {
    "optimize": "blocks are shared out evenly, and the schedule is the strict one of `memory`",
    "memory_weight": "blocks are shared out evenly",
    "contiguous": "a partition is always consecutive blocks",
    "ddp_port": "Horovod finds its ports",
    "ddp_dist_backend": "Horovod runs over NCCL on GPUs and over Gloo on CPUs",
    "deterministic_server": "every rank's order of requests is fixed in advance",
    "skip_tracing": "nothing is traced to be measured",
    "static_mode": "shapes are always static",
    "fast_mode": "a hidden state always goes to the next stage alone",
    "delayed_parameter_initialization": "a Keras layer makes its variables where it first runs",
    "activation_loading_horizon": "it belongs to offload_activations",
    "enabled": "it belongs to the launcher",
    "processes_per_host": "horovodrun's -H says it",
    "custom_mpi_options": "horovodrun takes options of its own",
}
# Refused unless they have the value that changes nothing: that value, and why.
REFUSED: dict[str, tuple[Any, str]] = {
    "tensor_parallel_degree": (1, f"{PYTORCH_ONLY}; --strategy=pipeline has it"),
    "shard_optimizer_state": (False, f"{PYTORCH_ONLY}; --shard_optimizer_state has it"),
    "sharded_data_parallel_degree": (1, f"{PYTORCH_ONLY}; --shard_parameters has it"),
    "sdp_reduce_bucket_size": (None, "it belongs to sharded_data_parallel_degree"),
    "sdp_param_persistence_threshold": (None, "it belongs to sharded_data_parallel_degree"),
    "sdp_max_live_parameters": (None, "it belongs to sharded_data_parallel_degree"),
    "sdp_hierarchical_allgather": (None, "it belongs to sharded_data_parallel_degree"),
    "sdp_gradient_clipping": (None, "clip the gradients outside the step"),
    "offload_activations": (False, f"{PYTORCH_ONLY}; --offload_activations has it"),
    "prescaled_batch": (False, "it belongs to tensor_parallel_degree"),
    "fp16": (False, "set keras.mixed_precision in the script, or take --precision=float16"),
    "fp16_params": (False, "set keras.mixed_precision in the script"),
    "bf16": (False, "set keras.mixed_precision in the script, or take --precision=bfloat16"),
    "load_partition": (False, "the partition follows from the number of blocks"),
    "partition_file": (None, "the partition follows from the number of blocks"),
}
CHOICES = {
    "pipeline": ("interleaved", "simple", "_only_forward"),
    "optimize": ("memory", "speed"),
}


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """What of SageMaker's configuration a script's steps depend on."""

    partitions: int = 1
    microbatches: int = 1
    pipeline: str = "interleaved"
    placement_strategy: str = "cluster"
    auto_partition: bool = True
    default_partition: int | None = None
    horovod: bool = False
    active_microbatches: int = 0

    @property
    def schedule(self) -> str:
        """The order of the microbatches under our name: SageMaker's `interleaved` is 1F1B."""
        return "simple" if self.pipeline == "simple" else "1f1b"


def read_parameters(given: Mapping[str, Any] | None, num_ranks: int) -> Parameters:
    """Returns the parameters of a run: the launcher's over the script's.

    Args:
      given: the script's.
      num_ranks: of the job.

    Raises:
      UserError: an unknown or refused name or value, with the reason.

    >>> read_parameters({"partitions": 2, "microbatches": 4}, 2).schedule
    '1f1b'
    """
    values = {**(given or {}), **_of_launcher()}
    fields: dict[str, Any] = {}
    for name, value in values.items():
        if name in REFUSED:
            unchanged, reason = REFUSED[name]
            if value is not None and value != unchanged:
                raise UserError(f"smp parameter {name}={value!r} isn't served: {reason}.")
        elif name in ACCEPTED:
            _set(fields, name, value)
        elif name not in WITHOUT_EFFECT:
            known = [*ACCEPTED, *WITHOUT_EFFECT, *REFUSED]
            raise UserError(f"smp parameter {name} is not known.{near_matches(name, known)}")
        if name in CHOICES and value not in CHOICES[name]:
            choices = " or ".join(CHOICES[name])
            raise UserError(f"smp parameter {name}={value!r} is not known: it is {choices}.")
    parameters = Parameters(**fields)
    _check(parameters, num_ranks)
    return parameters


def _of_launcher() -> dict[str, Any]:
    text = os.environ.get(ENVIRONMENT, "")
    try:
        values = json.loads(text) if text else {}
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise UserError(f"{ENVIRONMENT} is no JSON object: {text[:100]}")
    return values


def _set(fields: dict[str, Any], name: str, value: Any) -> None:
    field = ACCEPTED[name]
    kind = {"pipeline": str, "placement_strategy": str}.get(
        field, bool if field in ("auto_partition", "horovod") else int
    )
    if type(value) is not kind and not (field == "default_partition" and value is None):
        raise UserError(f"smp parameter {name}={value!r} must be of type {kind.__name__}.")
    if field == "horovod":
        value = value or fields.get(field, False)
    if field == "partitions" and fields.get(field, value) != value:
        raise UserError(
            f"smp parameters partitions={fields[field]} and {name}={value} say two things: they"
            " are two names of one number, give one of them."
        )
    fields[field] = value


def _check(parameters: Parameters, num_ranks: int) -> None:
    partitions, microbatches = parameters.partitions, parameters.microbatches
    for name, value in (("partitions", partitions), ("microbatches", microbatches)):
        if value < 1:
            raise UserError(f"smp parameter {name}={value} must be at least 1.")
    if parameters.pipeline == "_only_forward":
        raise UserError(
            "smp parameter pipeline='_only_forward' isn't served: a step that asks for no gradient"
            " runs forward only anyway."
        )
    if num_ranks % partitions:
        raise UserError(
            f"{num_ranks} ranks are no multiple of the smp parameter partitions={partitions}: start"
            f" {max(1, num_ranks // partitions) * partitions} ranks."
        )
    if num_ranks > partitions and not parameters.horovod:
        raise UserError(
            f"{num_ranks} ranks and partitions={partitions} make {num_ranks // partitions} replicas"
            " whose gradients nobody would sum: set the smp parameter horovod to True and reduce"
            f" them by trainers.hvd, or set partitions to {num_ranks}."
        )
    default = parameters.default_partition
    if not parameters.auto_partition and default is None:
        raise UserError("smp parameter auto_partition=False needs default_partition.")
    if default is not None and not 0 <= default < partitions:
        raise UserError(
            f"smp parameter default_partition={default} must be from 0 to {partitions - 1}."
        )
