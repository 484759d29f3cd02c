"""Looks at this host, or under a launcher at all hosts, before a run: `tfbig doctor`.

Exit code 0: fine; 1: problems found; 2: a user's mistake.
"""

import functools
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfbig.checkpoint import nearest_folder
from tfbig.command import EXIT_FAULT, is_launched, launched_rank, run_command
from tfbig.diagnosis import devices, disk, hashes, limits, network, versions
from tfbig.diagnosis.doctor_config import DoctorConfig
from tfbig.diagnosis.finding import Examined, Finding, HostReport, differing_facts, guarded, merged
from tfbig.diagnosis.page import as_json, page, wants_colour
from tfbig.errors import UserError
from tfbig.flags import Flags
from tfbig.launching.place import num_gpus
from tfbig.presets import preset
from tfbig.together import on_every_rank
from trainers.agreement import code_hash
from trainers.mesh import placement_order


def run(config: DoctorConfig) -> int:
    """Prints the page; under a launcher rank 0 does, of all hosts.

    Returns:
      0 when no problem was found, else 1.

    Raises:
      UserError: a flag makes no sense.
    """
    hosts = check(config)
    root = Path(__file__).parents[1]
    first = guarded("versions", lambda: versions.examine(f"{code_hash(root):016x}"))
    broken = any(finding.level == "problem" for finding in first.findings)
    if is_launched() and not broken:
        reports, cluster = _examine_cluster(config, hosts, first)
    else:
        reports, cluster = _examine_alone(config, hosts, first, broken), []
    if launched_rank():
        if broken:  # rank 0 does not hear of it
            print(page(reports[0].findings, 1, 1, colour=False), file=sys.stderr, flush=True)
        return _code([*merged(reports), *cluster])
    findings = [*merged(reports), *differing_facts(reports), *cluster]
    if config.json:
        print(as_json(findings, reports))
    else:
        num_hosts = len({report.host for report in reports})
        print(page(findings, num_hosts, len(reports), wants_colour()))
    return _code(findings)


def _code(findings: Sequence[Finding]) -> int:
    return EXIT_FAULT if any(finding.level == "problem" for finding in findings) else 0


@on_every_rank(is_agreed=False)
def check(config: DoctorConfig) -> list[tuple[str, int]]:
    """Returns the hosts to reach, after a look at all flags.

    Raises:
      UserError: one makes no sense.
    """
    for name in ("pipeline_parallel_degree", "tensor_parallel_degree", "megabytes"):
        if getattr(config, name) < 1:
            raise UserError(f"--{name}={getattr(config, name)} must be at least 1: change it.")
    if not config.min_bandwidth >= 0:
        raise UserError(f"--min_bandwidth={config.min_bandwidth} must be at least 0: change it.")
    placement_order(config.placement_strategy)
    if config.preset:
        preset(config.preset)
    return network.parse_hosts(config.hosts)


def _examine_alone(
    config: DoctorConfig, hosts: list[tuple[str, int]], first: Examined, broken: bool
) -> list[HostReport]:
    """Returns the report of this host; where ranks cannot talk, rank 0's speaks for itself."""
    seen: dict[str, Any] = {}
    if not broken:
        probed, seen = versions.probe()
        nccl = guarded("versions", lambda: versions.examine_nccl(seen.get("nccl", "")))
        first.findings += [*probed.findings, *nccl.findings]
        first.facts |= nccl.facts
    if is_launched():
        text = "the ranks cannot talk, so that only rank 0's host was looked at"
        first.add("versions", "warning", text, "mend the problem above on every host first")
    found = [first, *_examine_host(config, hosts, seen, local_size=1, num_hosts=1)]
    return [_report(0, found)]


def _examine_host(
    config: DoctorConfig,
    hosts: list[tuple[str, int]],
    seen: dict[str, Any],
    local_size: int,
    num_hosts: int,
) -> list[Examined]:
    gpus, driver = devices.read_gpus()
    has_gpus = bool(gpus) or num_gpus({}) > 0
    found = [
        guarded("devices", lambda: devices.examine(gpus, driver, has_gpus, seen, local_size)),
        guarded("devices", lambda: devices.examine_cores(local_size)),
        guarded("network", lambda: network.examine(network.read_cards(), num_hosts)),
        guarded("network", lambda: network.reach(hosts)),
        guarded("disk", lambda: disk.examine_shared_memory(local_size, has_gpus)),
        guarded("limits", limits.examine),
        guarded(
            "disk", lambda: disk.examine(config.run_dir or ".", config.preset, config.megabytes)
        ),
    ]
    if gpus and not versions.uses_nccl():
        found[0].add(
            "devices",
            "problem",
            "Horovod was built without NCCL: tensors would cross to host memory and back",
            "HOROVOD_GPU_OPERATIONS=NCCL python -m tfbig.install_horovod",
        )
    if config.data:
        found.append(guarded("hashes", lambda: hashes.examine(config.data, config.verify_data)))
    return found


def _report(rank: int, found: Sequence[Examined]) -> HostReport:
    findings = tuple(finding for one in found for finding in one.findings)
    facts = {name: value for one in found for name, value in one.facts.items()}
    return HostReport(rank, socket.gethostname(), findings, facts)


def _examine_cluster(
    config: DoctorConfig, hosts: list[tuple[str, int]], first: Examined
) -> tuple[list[HostReport], list[Finding]]:
    """Returns every rank's report, and what holds for the cluster as a whole."""
    import tensorflow as tf

    from tfbig.diagnosis import bandwidth
    from tfbig.parallel_config import ParallelConfig
    from trainers.collectives import Engine
    from trainers.devices import prepare_devices

    engine = Engine()
    try:
        with on_every_rank():
            mesh = bandwidth.mesh_of(config, engine.size)
        names = bandwidth.gather_json(engine, socket.gethostname())
        nccl = guarded("versions", lambda: versions.examine_nccl(versions.loaded_nccl()))
        found, num_hosts = [first, nccl], len(set(names))
        seen = {
            "gpus": len(tf.config.list_physical_devices("GPU")),
            "cuda": tf.test.is_built_with_cuda(),
        }
        if engine.local_rank == 0:  # one rank looks at a host
            found += _examine_host(config, hosts, seen, engine.local_size, num_hosts)
        elif config.data:
            quick = functools.partial(hashes.examine, config.data, False)
            found.append(Examined(facts=guarded("hashes", quick).facts))
        try:
            prepare_devices(ParallelConfig(), engine.local_rank, engine.local_size)
        except UserError as error:
            found[0].add("devices", "problem", str(error))
        found.append(bandwidth.examine_clock(engine))
        if config.run_dir and num_hosts > 1:
            folder = nearest_folder(config.run_dir)
            found.append(bandwidth.examine_shared_folder(engine, folder))
        reports = bandwidth.gather_reports(engine, _report(engine.rank, found))
    finally:
        engine.close()
    engine = Engine(bandwidth.groups_to_measure(mesh, names))
    try:
        own = bandwidth.measure(engine, names, config.megabytes)
        gathered = bandwidth.gather_json(engine, [one._asdict() for one in own])
        engine.barrier(60)
    finally:
        engine.close()
    measured = bandwidth.each_once(gathered)
    return reports, bandwidth.describe(measured, config.min_bandwidth).findings


def _body(arguments: Sequence[str]) -> int:
    summary = "looks at this host, or under a launcher at all hosts, before a run."
    return run(DoctorConfig(**Flags("doctor", (DoctorConfig,), summary).parse(arguments)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command and exits."""
    run_command("doctor", _body, sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    main()
