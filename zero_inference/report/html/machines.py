"""Runs by the machine that they ran on: its measured rates, and where each run lies under its rooflines."""

from __future__ import annotations

from dataclasses import dataclass

from zero_inference.records.hardware import HOST_COPY
from zero_inference.report.run import BOUND_NAMES, Run, clean
from zero_inference.utils.format import format_number

SAME_RATE = 1.5  # links that differ by more are of different machines: a generation of PCIe is a factor of 2


@dataclass(frozen=True)
class Point:
    """A run under the rooflines; `bytes_per_token` are those moved at the rate that limits it.

    That is what a step reads from disk where the disk binds it; what it reads of device memory where that binds it or nothing lies
    elsewhere; and else what lies outside device memory, copied over the link or read by the host's cores.

    Attributes:
        bound: the rate that binds the run.
        limit: token/s that the run's own measured rates allow; None where the record does not say.
    """

    run: Run
    bound: str
    bytes_per_token: float
    tokens_per_s: float
    limit: float | None


@dataclass(frozen=True)
class Machine:
    """`rates`: lowest and highest that the runs measured, in bytes/s of all devices together, by what binds; those that apply to a
    run here."""

    name: str
    points: list[Point]
    rates: dict[str, tuple[float, float]]


def machines_of(runs: list[Run]) -> list[Machine]:
    """Machines with a run whose bytes and rates are known, the one with most runs first."""
    alike: dict[tuple, list[Point]] = {}
    for run in runs:
        if point := _point(run):
            alike.setdefault(_hardware(run), []).append(point)
    machines = []
    for points in alike.values():
        parts = (
            _by_link(points) if _has_link(points[0].run) else [points]
        )  # the memory of a host that is busy is no other machine
        for part in parts:
            if rates := _rates_of(part):
                machines.append(Machine(_name(part, rates, several=len(parts) > 1), part, rates))
    return sorted(machines, key=lambda machine: -len(machine.points))


def _point(run: Run) -> Point | None:
    batch, speed, share = run.request.batch_size, run.decode_throughput, run.share_of_limit
    if not speed or not batch or batch < 0 or not run.bound_by or (nbytes := _bytes_per_step(run)) <= 0:
        return None
    return Point(run, run.bound_by, nbytes / batch, speed, speed / share if share else None)


def _bytes_per_step(run: Run) -> float:
    """See `Point`; 0 where it is not known."""
    if run.bound_by == "disk":
        return _moved(run, "disk_read")
    outside = _outside(run) if _has_link(run) and run.bound_by != run.memory else 0.0
    step_s, rate = run.limit.floor_step_s.device_memory, rates(run).get(run.memory)
    return outside or (step_s or 0.0) * (rate or 0.0)


def _outside(run: Run) -> float:
    """Bytes of a step that the link owes, see `planning.limits.decode_limits`, and that the cores read."""
    steps = (run.request.gen_len or 0) - 1
    ahead = (run.limit.link_ahead_bytes or 0.0) / steps if steps > 0 else 0.0
    return max(0.0, _moved(run, "host_to_device") - ahead) + _moved(run, "cores")


def _moved(run: Run, what: str) -> float:
    return max(0.0, getattr(run.measured.transfers, f"{what}_bytes_per_step") or 0.0)


def _has_link(run: Run) -> bool:
    return run.limit.rates.link_kind != HOST_COPY


def rates(run: Run) -> dict[str, float]:
    """Bytes/s of all devices together, by what binds; those of the link, of cores beside it and of the disk are so in the record."""
    link, cores = run.limit.rates.link_beside_cores_gb_per_s, run.limit.rates.cores_gb_per_s
    device = run.limit.rates.device_copy_gb_per_s
    known = {
        "link": run.limit.rates.link_gb_per_s if _has_link(run) else None,
        "link_and_cores": link + cores if link and cores and _has_link(run) else None,
        "disk": run.limit.rates.disk_gb_per_s,
        run.memory: device * max(1, run.request.world_size or 1) if device else None,
    }
    return {bound: 1e9 * rate for bound, rate in known.items() if rate and rate > 0}


def _rates_of(points: list[Point]) -> dict[str, tuple[float, float]]:
    """Of what the runs move: no link where no run has bytes outside device memory, no cores where they never multiply."""
    applies: set[str] = set()
    for point in points:
        if point.run.bound_by == "disk":
            applies.add("disk")
        elif _has_link(point.run) and point.run.bound_by != point.run.memory and _outside(point.run):
            applies |= {"link"} | ({"link_and_cores"} if _moved(point.run, "cores") else set())
        else:
            applies.add(point.run.memory)
    found: dict[str, list[float]] = {}
    for point in points:
        for bound, rate in rates(point.run).items():
            if bound in applies:
                found.setdefault(bound, []).append(rate)
    return {bound: (min(found[bound]), max(found[bound])) for bound in BOUND_NAMES if bound in found}


def _hardware(run: Run) -> tuple:
    """The names by which machines are told apart."""
    return (
        tuple(run.gpu_names),
        run.environment.cpu_model,
        run.environment.cpu_cores,
        run.request.world_size,
        run.request.num_nodes,
        _has_link(run),
    )


def _by_link(points: list[Point]) -> list[list[Point]]:
    """Machines of the same names whose links differ too much to be one."""

    def rate(point: Point) -> float:
        known = rates(point.run)
        return known.get("link") or known.get(point.run.memory) or 0.0

    parts: list[list[Point]] = []
    for point in sorted(points, key=rate, reverse=True):
        if not parts or rate(parts[-1][0]) > SAME_RATE * rate(point) > 0:
            parts.append([])
        parts[-1].append(point)
    return [sorted(part, key=lambda point: point.run.number) for part in parts]


def _name(points: list[Point], found: dict[str, tuple[float, float]], several: bool) -> str:
    run = points[0].run
    cpu, cores, ranks = run.environment.cpu_model, run.environment.cpu_cores, run.request.world_size
    parts = [run.gpus or ("no GPU" if cpu else "machine not recorded")]
    if cpu:
        parts.append(f"{cpu} with {cores} cores" if cores else cpu)
    if ranks and ranks > 1:
        parts.append(f"{ranks} ranks")
    if several and (rate := found.get("link") or found.get(run.memory)):
        parts.append(f"{'link' if 'link' in found else 'memory'} {format_number(rate[1] / 1e9)} GB/s")
    return clean(", ".join(parts))
