"""Compare predictions with the committed runs of one H200 or H100.

    python benchmarks/predictions.py [PATTERN] [--machine FILE]
    python benchmarks/predictions.py --ranges

Plans the runs of one GPU under benchmarks/results whose path contains PATTERN; needs no GPU. The hardware profile is FILE, which
`zero-inference link --save` wrote; without it, the rates in the record itself: link, device memory, products, CPU beside the link.
No record has the launch overhead; `LAUNCHES` is used for all. Figures are (measured - predicted) / predicted.

--ranges prints the table `RANGES` of `zero_inference.planning.cost` from the runs of HOSTS, each planned for the profile of its host, and
counts the runs of each host that are within the ranges made from the other hosts.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from zero_inference.config.run_config import parse_options
from zero_inference.engines.base import Job
from zero_inference.engines.stream.plan import StreamPlan
from zero_inference.errors import UsageError
from zero_inference.hardware.machine import Machine
from zero_inference.hardware.profile import (
    CpuAttentionRate,
    CpuProductRate,
    CpuProfile,
    Gpu,
    HardwareProfile,
    LaunchOverhead,
    read_profile,
)
from zero_inference.models.empty_model import EmptyModel, build_empty_model
from zero_inference.models.spec import resolve_model
from zero_inference.planning.cost import Range, compared_s
from zero_inference.planning.make_plan import make_plan
from zero_inference.planning.plan import Plan
from zero_inference.records.read import read_records
from zero_inference.utils.ranks import detect_ranks

RESULTS = Path(__file__).parent / "results"
DROPPED_OPTIONS = (
    "--log-file",
    "--log-dir",
    "--offload-dir",
    "--trace",
    "--local_rank",
    "--local-rank",
)  # no part of a plan
GIB = 1 << 30
# A resident Llama-3.1-8B (h200-x2) took 20.5 ms for a step of 1238 kernels; 13B int4 in graphs (h200-balanced) 6.9 ms for 1542. Neither
# was measured by itself: `zero-inference link --save` does that since then.
LAUNCHES = LaunchOverhead(operator_s=15e-6, step_s=1e-3, graph_operator_s=2e-6)
PROCESS_BYTES = 2_100_000_000  # host memory of the runs besides weights, keys and values: 1.5 to 2.4 GB
# Hosts whose `link --save` measured as it does now: beginning of their records' paths -> its file. The files of the tenth and eleventh
# host have the twelfth's hand-offs.
HOSTS = {f"h200-kept/{name}_host": f"h200-kept/{name}_host/machine_again.json" for name in ("tenth", "eleventh")}
HOSTS |= {
    f"h200-kept/{name}_host": f"h200-kept/{name}_host/machine.json" for name in "twelfth thirteenth fourteenth".split()
}
HOSTS |= {
    "h200-big-models/bs": "h200-big-models/machine.json",
    "h200-together/table": "h200-together/table/machine.json",
    "h100-predicted": "h100-predicted/machine.json",
    "h100-readme": "h100-readme/machine.json",
}
SLOW_COPIES = ("h100-predicted",)  # loading copied compared layers to memory that was faulted in page by page
PAGEABLE_GB_PER_S, DISK_GB_PER_S = 9.5, 2.3  # of an H200 host, where a record lacks them (h200/link.txt)
LINK_GB_PER_S, DEVICE_GB_PER_S, TFLOPS = 55.3, 4225.0, 680.0  # the same, for the oldest records
OUTSIDE, STEP = 0.06, 0.05  # share of runs outside a range; what its ends are rounded to


def options_of(record: dict[str, Any]) -> list[str]:
    """Return the options of the run, as they are named today."""
    words = record["argv"][1:]
    found, argv = [], iter(words[1:] if words[:1] == ["run"] else words)
    for word in argv:
        if word in DROPPED_OPTIONS:
            next(argv)
        elif not word.startswith("--local_rank="):
            found.append(word)
    if record["quant_bits"] != 16 and "--quant-group-size" not in found:  # 4 bits had another default
        found += ["--quant-group-size", str(record["quant_group_size"])]
    stream = record.get("stream") or {}
    if record["engine"] == "stream":
        # the only way when these were recorded
        found += [] if stream.get("cores") or "--cpu-compute" in found else ["--cpu-compute", "off"]
        found += [] if stream.get("decode_graph") else ["--decode-graph", "off"]
    return found


def machine_of(record: dict[str, Any]) -> HardwareProfile:
    """Return the hardware profile that follows from the rates in the record."""
    limit, cores = record.get("limit") or {}, (record.get("stream") or {}).get("cores") or {}
    memory = record["environment"]["gpus"][0]["memory_bytes"]
    found = None
    if cores.get("cores_gbps"):
        rates = {key: cores[key] for key in ("link_gbps", "cores_gbps", "cores_alone_gbps", "crossing_s")}
        kind = record["dtype"] if record["quant_bits"] == 16 else f"int{record['quant_bits']}"
        point = CpuProductRate.model_validate(rates | {"format": kind, "rows": record["batch_size"]})
        attended = None
        if rate := cores.get("attention_gbps"):  # of the heads of this model, and of the link as it was in this run
            attended = CpuAttentionRate(format=record["dtype"], heads=1, gb_per_s=rate, alone_gb_per_s=rate)
        found = CpuProfile(
            threads=cores["threads"],
            instructions=cores["instructions"],
            read_gb_per_s=cores.get("read_gbps") or cores["cores_gbps"],
            products=(point,),
            attention=() if attended is None else (attended,),
        )
    return HardwareProfile(
        source="measured",
        name="an H200",
        gpus=(Gpu(name="NVIDIA H200", memory_bytes=memory, free_bytes=memory - GIB),),
        host_memory_bytes=120 * GIB,
        link_gb_per_s=cores.get("link_alone_gbps") or limit.get("link_gbps") or LINK_GB_PER_S,
        pageable_link_gb_per_s=PAGEABLE_GB_PER_S,
        device_gb_per_s=limit.get("device_copy_gbps") or DEVICE_GB_PER_S,
        matmul_tflops={record["dtype"]: limit.get("matmul_tflops") or TFLOPS},
        disk_gb_per_s=DISK_GB_PER_S,
        cores=found,
        launches=LAUNCHES,
        process_bytes=PROCESS_BYTES,
    )


def plan_of(record: dict[str, Any], machine: Machine, empty_models: dict[Any, EmptyModel]) -> Plan:
    """Return the plan of the record's run for `machine`. `empty_models` keeps the models for later calls."""
    config = parse_options([*options_of(record), "--dry-run"])
    ranks = machine.ranks_there(detect_ranks())
    spec = resolve_model(config, ranks.device.type)
    if (config.model, spec.dtype) not in empty_models:
        empty_models[config.model, spec.dtype] = build_empty_model(spec)
    empty_model = empty_models[config.model, spec.dtype]
    plan = make_plan(Job(config, spec, ranks, empty_model, machine.free_device_bytes((ranks.device,)), machine))
    cores = (record.get("stream") or {}).get("cores") or {}
    return plan if "prompt_rows" in cores else without_short_prompts(plan)


def without_short_prompts(plan: Plan) -> Plan:
    """Return `plan` with the device computing all of each prompt, as in runs before the CPU took a share."""
    weights = plan.engine_plan.without_short_prompts()
    return plan if weights is None else replace(plan, engine_plan=weights)


def errors_of(record: dict[str, Any], plan: Plan) -> dict[str, float | None]:
    """Return (measured - predicted) / predicted; None where one of them is missing."""
    predicted = plan.predicted
    pairs = {
        "decode": (record["decode_latency_s"], predicted.decode_s),
        "prefill": (record["prefill_latency_s"], predicted.prefill_s),
        "device": (record.get("peak_gpu_bytes"), predicted.peak_gpu_bytes),
        "host": (record.get("peak_host_bytes"), predicted.peak_host_bytes),
    }
    return {name: measured / value - 1 if measured and value else None for name, (measured, value) in pairs.items()}


@dataclass(frozen=True)
class Ratio:
    """Measured over predicted time of a run on `host`; `kind` is a key of `RANGES`."""

    host: str
    kind: str
    value: float


def ratios() -> Iterator[Ratio]:
    """Yield measured over predicted times of the runs of HOSTS.

    Left out are decode steps of mixtures whose greedy tokens chose the same experts again and again, loading on SLOW_COPIES, loading by
    DeepSpeed where compiling counted as loading, and runs of mixtures before prompts skipped cached experts and fetched experts stayed.
    """
    empty_models: dict[Any, EmptyModel] = {}
    for host, file in HOSTS.items():
        machine = read_profile(RESULTS / file)
        for _, record in records(host):
            plan = plan_of(record, Machine(machine), empty_models)
            predicted, times = plan.predicted, plan.times
            copies_layers = "compile_s" in record  # to compare them, as loading does today
            assert times is not None and predicted.load_s is not None
            if (record["engine"] != "deepspeed" or copies_layers) and host not in SLOW_COPIES:
                copying_s = 0.0 if copies_layers else compared_s(plan.engine_plan)
                yield Ratio(host, "load", (record["load_s"] + copying_s) / predicted.load_s)
            placement = plan.engine_plan.placement if isinstance(plan.engine_plan, StreamPlan) else None
            is_old = placement is not None and "prompt_rows" not in ((record.get("stream") or {}).get("cores") or {})
            if not (is_old and placement.gathered_bytes):
                yield Ratio(host, times.prefill.kind, record["prefill_latency_s"] / times.prefill.seconds)
            if is_old and any(placement.quota):
                continue
            if not plan.job.spec.experts[0] or record.get("dummy_routing") == "text":
                yield Ratio(host, times.step.kind, record["decode_latency_s"] / (predicted.decode_s or 1.0))


def ranges_of(found: Sequence[Ratio]) -> dict[str, Range]:
    """Return the ranges of `found` by kind, rounded outward to steps of `STEP`."""
    ranges = {}
    for kind in dict.fromkeys(each.kind for each in found):
        low, high = np.quantile([each.value for each in found if each.kind == kind], [OUTSIDE / 2, 1 - OUTSIDE / 2])
        ranges[kind] = Range(round(math.floor(low / STEP) * STEP, 2), round(math.ceil(high / STEP) * STEP, 2))
    return ranges


def within_others(found: Sequence[Ratio]) -> dict[str, dict[str, list[bool]]]:
    """Return, by host and kind, whether each ratio is within the range made from all other hosts; only kinds that these have."""
    inside: dict[str, dict[str, list[bool]]] = {}
    for host in HOSTS:
        others = ranges_of([each for each in found if each.host != host])
        for each in found:
            if each.host == host and each.kind in others:
                low, high = others[each.kind]
                inside.setdefault(host, {}).setdefault(each.kind, []).append(low <= each.value <= high)
    return inside


def print_ranges() -> None:
    found = list(ratios())
    ranges, inside = ranges_of(found), within_others(found)
    for kind, (low, high) in ranges.items():
        values = [each.value for each in found if each.kind == kind]
        of_others = [each for host in inside.values() for each in host.get(kind, [])]
        print(
            f"{kind:18} {low:.2f} to {high:.2f}, median {statistics.median(values):.2f}, {min(values):.2f} to {max(values):.2f} of "
            f"{len(values)} runs; {sum(of_others)} of {len(of_others)} within the ranges of other hosts"
        )
    for host, kinds in inside.items():
        every = sum(kinds.values(), [])
        print(f"{host}: {sum(every)} of {len(every)}")


def records(pattern: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, record) of complete runs of one GPU; a name is the path under RESULTS."""
    for path in sorted(RESULTS.glob("h[12]00*/**/*.jsonl")):
        name = str(path.relative_to(RESULTS).with_suffix(""))
        if pattern not in name or "/parts/" in name or "/compare" in name:
            continue
        for record in read_records(path):
            one_gpu = record.get("world_size") == 1 and record.get("num_gpus") in (None, 1)
            if record.get("status") == "ok" and one_gpu and "decode_latency_s" in record:
                yield name, record


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pattern", nargs="?", default="", help="of the records' paths under benchmarks/results")
    parser.add_argument(
        "--machine", type=Path, metavar="FILE", help="plan for this hardware profile, not for the rates of each record"
    )
    parser.add_argument("--ranges", action="store_true", help="the ranges of predicted times, from all hosts")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if args.ranges:
        print_ranges()
        return
    given = read_profile(args.machine) if args.machine else None
    names = ("decode", "prefill", "device", "host")
    kinds: dict[str, dict[str, list[float]]] = {}
    empty_models: dict[Any, EmptyModel] = {}
    print(f"{'':48} {'step (ms)':>10} " + " ".join(f"{name:>8}" for name in names) + "  bound by")
    for name, record in records(args.pattern):
        try:
            machine = given or machine_of(record)
            plan = plan_of(record, Machine(machine), empty_models)
        except UsageError as error:  # FILE lacks rates for these options
            print(f"{name[-48:]:48} not planned: {error}")
            continue
        errors = errors_of(record, plan)
        step_ms = 1e3 * record["decode_latency_s"] / (record["gen_len"] - 1)
        shown = " ".join("       -" if errors[each] is None else f"{errors[each]:+8.1%}" for each in names)
        print(f"{name[-48:]:48} {step_ms:10.2f} {shown}  {plan.predicted.bound_by}", flush=True)
        with_cpu = " with the CPU" if plan.engine_plan.cpu_bytes else ""
        of_kind = kinds.setdefault(f"{record['engine']}{with_cpu}", {each: [] for each in names})
        for each in names:
            of_kind[each] += [] if errors[each] is None else [errors[each]]
    print("\nmedian, and the part within 10%:")
    for kind, of_kind in kinds.items():
        shown = ", ".join(
            f"{each} {statistics.median(values):+.1%} ({sum(abs(value) <= 0.1 for value in values)} of {len(values)})"
            for each, values in of_kind.items()
            if values
        )
        print(f"{kind}: {shown}")


if __name__ == "__main__":
    main()
