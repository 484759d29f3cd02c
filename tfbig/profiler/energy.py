"""Energy and CO2 of a run: measured where something measures, else estimated, and said so."""

from typing import NamedTuple

import numpy as np

from tfbig.profiler.energy_assumptions import Assumptions
from tfbig.profiler.run_data import RunData
from tfbig.profiler.system_table import SystemTable


class Energy(NamedTuple):
    """Joules over all hosts, and what the numbers rest on."""

    gpu: float
    cpu: float
    memory: float
    overhead: float
    kilograms: float
    basis: str

    @property
    def joules(self) -> float:
        """All of it."""
        return self.gpu + self.cpu + self.memory + self.overhead


def _integral(times: np.ndarray, watts: np.ndarray) -> float:
    """Returns the joules of a power over time; gaps of more than two minutes are not filled."""
    if len(times) < 2:
        return 0.0
    steps = np.diff(times)
    steps = np.where(steps > 120, 0.0, steps)
    return float(np.nansum((watts[1:] + watts[:-1]) / 2 * steps))


def _sum(values: np.ndarray) -> np.ndarray:
    return np.nan_to_num(values).sum(axis=1)


def energy_of(run: RunData, assumptions: Assumptions) -> Energy | None:
    """Returns the energy of a run, None where no host was sampled."""
    tables = [table for table in run.system if len(table.times) > 1]
    if not tables:
        return None
    gpu = sum(_integral(t.times, _sum(t.of("gpu", "PowerWatts", "mean"))) for t in tables)
    measured = [bool(t.of("power", "PowerWatts").shape[1]) for t in tables]
    cpu = sum(_cpu(table, assumptions) for table in tables)
    gigabytes = {host["node_id"]: host["memory_bytes"] / 2**30 for host in run.hosts}
    memory = sum(
        assumptions.watts_per_gigabyte
        * gigabytes.get(t.node_id, 0.0)
        * _integral(t.times, np.ones(len(t.times)))
        for t in tables
    )
    overhead = (gpu + cpu + memory) * (assumptions.overhead - 1)
    total = gpu + cpu + memory + overhead
    cpu_basis = (
        "CPU by RAPL"
        if all(measured)
        else f"CPU estimated, {assumptions.watts_per_core:g} W a core in full use"
    )
    gpu_basis = "GPU by NVML" if gpu else "no GPU"
    basis = (
        f"{gpu_basis}; {cpu_basis}; memory {assumptions.watts_per_gigabyte:g} W/GB; data centre "
        f"x{assumptions.overhead:g}; grid {assumptions.kilograms_per_kwh:g} kg CO2 per kWh; "
        "whole hosts, also what others did on them"
    )
    kilograms = total / 3.6e6 * assumptions.kilograms_per_kwh
    return Energy(gpu, cpu, memory, overhead, kilograms, basis)


def _cpu(table: SystemTable, assumptions: Assumptions) -> float:
    measured = table.of("power", "PowerWatts", "mean")
    if measured.shape[1]:
        return _integral(table.times, _sum(measured))
    use = _sum(table.of("cpu", "CPUUtilization", "mean")) / 100  # cores in full use
    return _integral(table.times, assumptions.watts_per_core * use)
