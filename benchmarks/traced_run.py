"""Run a model with host memory printed at each stage, loading profiled and, on a GPU, decode steps traced after the loops.

    python benchmarks/traced_run.py OPTIONS_OF_RUN_MODEL

Steps are traced as the run makes them, also as CUDA graphs, which `--trace` cannot. For the second half of a generation of eight tokens
it prints the time by kernel, gaps by the kernel that ends them, and the kernels of some layers one by one. A profiler makes steps longer.
"""

from __future__ import annotations

import cProfile
import io
import json
import pstats
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

TOKENS, ROWS, LISTED_KERNELS = 8, 25, 130  # ROWS: of the profile and of kernels by time
STARTED = time.perf_counter()


class Kernel(NamedTuple):
    """Times in microseconds on the device."""

    begin: float
    duration: float
    name: str


def main(argv: list[str]) -> int:
    from zero_inference import cli, runner
    from zero_inference.measure import session
    from zero_inference.planning.plan import Plan

    load, measure = Plan.load, runner.measure_run

    def profiled(plan: Any, *arguments: Any) -> Any:
        print_stage(
            f"before loading; predicted: {plan.predicted.load_s} s, {plan.predicted.peak_host_bytes} bytes of host memory"
        )
        profiler = cProfile.Profile()
        loaded = profiler.runcall(load, plan, *arguments)
        print_stage("loaded")
        text = io.StringIO()
        pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(ROWS)
        print(text.getvalue(), file=sys.__stdout__)
        return loaded

    def measured(plan: Any, loaded: Any, *arguments: Any) -> session.Session:
        found = measure(plan, loaded, *arguments)
        print_stage("measured")
        if loaded.device.type == "cuda":
            print_kernels(trace_kernels(loaded, found))
        return found

    Plan.load, runner.measure_run = profiled, measured
    return cli.main(["run_model.py", *argv])


def print_stage(stage: str) -> None:
    """Print `stage` with the process's host memory, now and at its peak, to the real stdout: the run redirects it while it loads."""
    from zero_inference.utils.environment import peak_host_bytes, resident_host_bytes

    memory = f"{resident_host_bytes() / 1e9:.2f} GB, at most {peak_host_bytes() / 1e9:.2f}"
    print(f"[{time.perf_counter() - STARTED:.1f} s] {stage}: {memory}", file=sys.__stdout__, flush=True)


def trace_kernels(loaded: Any, session: Any) -> list[Kernel]:
    """Generate TOKENS tokens; return kernels and copies by their begin, without copies from the host, which run beside them."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from zero_inference.models.prompts import greedy_config

    ids = session.ids.to(loaded.device)
    extra = {"past_key_values": session.make_cache()} if session.make_cache else {}
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        loaded.model.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=greedy_config(TOKENS), **extra
        )
        torch.cuda.synchronize(loaded.device)
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    of_device = [each for each in events if each.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    kernels = [Kernel(each["ts"], each["dur"], each["name"]) for each in of_device]
    return sorted(each for each in kernels if not each.name.startswith("Memcpy HtoD"))


def print_kernels(kernels: list[Kernel]) -> None:
    """Print the second half of a trace: time by kernel, gaps by the kernel after them, and some kernels in order."""
    half = (kernels[0].begin + kernels[-1].begin) / 2
    late = [each for each in kernels if each.begin >= half]
    busy_us, gaps, reached = Counter[str](), Counter[str](), late[0].begin
    launches = Counter(each.name for each in late)
    for each in late:
        gaps[each.name] += max(0.0, each.begin - reached)
        busy_us[each.name] += each.duration
        reached = max(reached, each.begin + each.duration)
    print(f"{(reached - late[0].begin) / 1e3:.1f} ms, of which {sum(gaps.values()) / 1e3:.1f} nothing computes")
    for name, spent_us in busy_us.most_common(ROWS):
        print(f"{spent_us / 1e3:10.2f} ms in {launches[name]:6d} x {name[:90]}")
    for name, spent_us in gaps.most_common(ROWS // 2):
        print(f"{spent_us / 1e3:10.2f} ms before {launches[name]:6d} x {name[:90]}")
    for each in late[len(late) // 2 :][:LISTED_KERNELS]:
        print(f"{each.begin - late[0].begin:12.1f} us, for {each.duration:9.1f}: {each.name[:70]}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
