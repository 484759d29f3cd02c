"""What statistics of frames are grouped by, and of which devices they are, as smdebug has them."""

import enum


class StatsBy(enum.Enum):
    """What steps' statistics are grouped by."""

    TRAINING_PHASE = "training_phase"
    FRAMEWORK_METRICS = "framework_metric"
    PROCESS = "process"


class Resource(enum.Enum):
    """A type of hosts' metrics."""

    CPU = "cpu"
    GPU = "gpu"
    IO = "i/o"
    NETWORK = "network"
    MEMORY = "memory"


def types_of(
    resource: "Resource | str | list[Resource] | list[str] | None",
) -> list[str] | None:
    """Returns the types that a resource, or a list of them, names; None means all."""
    if resource is None:
        return None
    wanted = resource if isinstance(resource, (list, tuple)) else [resource]
    return [Resource(one).value for one in wanted]
