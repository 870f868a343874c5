"""Kernel benchmark of the norms: checks that they are right, then times them.

    python benchmarks/run_cases.py --case rms [--dtype bf16|fp16|fp32|all] [--save-path ./configs/] [--peers] [--plot] [--profile]

Writes {save-path}/{case}/{dtype}/{case}-{dtype}-{fwd|bwd}-perf.csv, a row as soon as a size is measured: microseconds of each
provider (medians), `SpeedUp (us)` (a ratio: naive over cuda), GB/s over the bytes that have to move, times by CUDA graph of short
sizes, percentiles. A peer that cannot run leaves its cells empty, and stderr says why. Exit codes: 1 for a wrong kernel, before
anything is timed; 2 where it cannot run. All cases on all GPUs: scripts/measure_norms.sh.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# A file a case; importing them takes seconds.
NAMES = sorted(path.stem for path in (Path(__file__).parent / "cases").glob("[!_]*.py"))
DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
CHECKED = ((2, 128, 4096), (8, 4096, 1280), (1, 32768, 1280))  # batch, sequence, hidden
BATCHES, LENGTHS, HIDDENS = (1, 2, 4, 8), (1024, 2048, 4096, 8192), (2048, 4096)
GROUPED_TOKENS, GROUPED_HIDDEN = (1024, 2048, 4096, 8192, 16384, 32768, 65536), 1280
PLOT_HIDDEN = 4096
EPS = 1e-6
STARTED = time.perf_counter()


def main(argv: list[str] | None = None, device: str = "cuda", checked=CHECKED) -> int:
    """Check on `device` at sizes `checked` (batch, sequence, hidden), then time on a CUDA device. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--case", required=True, choices=NAMES)
    parser.add_argument("--dtype", default="bf16", choices=(*DTYPES, "all"))
    parser.add_argument(
        "--save-path", type=Path, default=Path("./configs/"), metavar="DIR", help="(default: %(default)s)"
    )
    parser.add_argument(
        "--peers", action="store_true", help="also time torch's own kernel, Liger and quack, where installed"
    )
    parser.add_argument(
        "--hidden", type=int, nargs="+", metavar="N", help="other hidden sizes (wide ones: 8192 12288 16384)"
    )
    parser.add_argument("--plot", action="store_true", help="batch 1 over the sequence: an image of the speedups")
    parser.add_argument(
        "--warmup-ms", type=_positive, default=5.0, metavar="MS", help="before each time (default: %(default)s)"
    )
    rep_ms = "launches of each time and clearing of the L2 cache, at least 10 launches (default: %(default)s)"
    parser.add_argument("--rep-ms", type=_positive, default=25.0, metavar="MS", help=rep_ms)
    parser.add_argument("--profile", action="store_true", help="also Chrome traces")
    args = parser.parse_args(argv)
    reason = why_cannot_time() if device == "cuda" else None
    if reason is not None:
        print(f"error: {reason}", file=sys.stderr)
        return 2
    import torch
    from cases import CASES
    from common.diff_engine import WrongResult
    from common.graph_times import make_workers

    case = CASES[args.case]
    # workers start while this process checks
    workers = [] if args.plot else make_workers(max(1, min(6, (os.cpu_count() or 2) // 2)))
    try:
        for name in DTYPES if args.dtype == "all" else (args.dtype,):
            dtype = getattr(torch, DTYPES[name])
            check(case, dtype, device, checked)
            measure(case, name, dtype, args, workers)
    except WrongResult as wrong:
        print(f"error: {wrong}", file=sys.stderr)
        return 1
    finally:
        for worker in workers:
            worker.close()
    return 0


def _positive(text: str) -> float:
    if not float(text) > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return float(text)


def say(line: str) -> None:
    print(f"[{time.perf_counter() - STARTED:6.1f} s] {line}", file=sys.stderr, flush=True)


def why_cannot_time() -> str | None:
    """Return why nothing can be timed on this machine, in one line."""
    import torch

    if not torch.cuda.is_available():
        return "the kernels are timed on a CUDA device, and there is none here."
    try:
        import triton.testing  # noqa: F401
    except ImportError:
        return "triton is not installed, whose do_bench takes the times; pip install triton."
    from zero_inference.kernels.extension import load_extension, why_unavailable

    return None if load_extension() else f"the CUDA kernels are not there: {why_unavailable()}"


def check(case, dtype, device: str, sizes) -> None:
    """Print the largest error at each size. Raises WrongResult at the first size at which outputs or gradients are off."""
    from common.diff_engine import calculate_diff, dtype_name

    for batch, length, hidden in sizes:
        errors = calculate_diff(case, bs=batch, sl=length, hidden_size=hidden, dtype=dtype, eps=EPS, device=device)
        worst = max(errors, key=errors.get)
        say(
            f"{case.name} {dtype_name(dtype)} at {batch} x {length} x {hidden}: right, "
            f"largest error {errors[worst]:.1e} ({worst})"
        )


def sizes_to_time(case, plot: bool, hiddens: list[int] | None) -> list[tuple[int, int, int]]:
    """Return (hidden, batch, sequence) of each size."""
    if case.grouped:
        return list(itertools.product(hiddens or (GROUPED_HIDDEN,), (1,), GROUPED_TOKENS))
    if plot:
        return [((hiddens or [PLOT_HIDDEN])[0], 1, length) for length in LENGTHS]
    return list(itertools.product(hiddens or HIDDENS, BATCHES, LENGTHS))


def say_size(times, table: Path | None, config: tuple[int, int, int]) -> None:
    """Print the times of a size to stderr and, if there is a `table`, write it with all sizes so far."""
    from common.tables import write_table

    say(
        f"{times.title} {' x '.join(map(str, config))}: "
        + ", ".join(f"{provider} {times.median_us(config, provider):.1f} us" for provider in times.providers)
    )
    if table is not None:
        write_table(table, times)


def measure(case, name: str, dtype, args: argparse.Namespace, workers: list) -> None:
    """Time both passes and write tables or plots. `workers` (none for plots) compile ahead, and the first one times by CUDA graph."""
    from common import bench_framework as bench
    from common import graph_times, tables
    from common.times import forget_compiled

    folder = args.save_path / case.name / name
    folder.mkdir(parents=True, exist_ok=True)
    configs = sizes_to_time(case, args.plot, args.hidden)
    makers = {
        "fwd": (bench.make_fwd_benchmark_for_case, bench.make_fwd_benchmark_plot_for_case),
        "bwd": (bench.make_bwd_benchmark_for_case, bench.make_bwd_benchmark_plot_for_case),
    }
    timed = {}
    for direction, (table, plot) in makers.items():
        file = f"{case.name}-{name}-{direction}-{'plot' if args.plot else 'perf'}"
        make = plot if args.plot else table
        how = dict(dtype=dtype, eps=EPS, peers=args.peers, warmup_ms=args.warmup_ms, rep_ms=args.rep_ms)
        benchmark = make(case=case, configs=configs, plot_name=file, **how)
        times, path = benchmark.times, folder / f"{file}.csv"
        times.on_size = functools.partial(say_size, times, None if args.plot else path)
        if args.plot:
            benchmark.run(print_data=True, save_path=str(folder))
            for left_over in (f"{file}.png", "results.html"):  # perf_report's own, without the geometric means
                (folder / left_over).unlink(missing_ok=True)
            tables.draw_speedups(
                [config[2] for config in configs],
                tables.speedups_of(times, configs),
                f"{case.name}, {name}, {direction}",
                folder / f"{file}.png",
            )
        else:
            if direction == "fwd":
                graph_times.compile_ahead(times, configs, workers)
                say(f"{case.name} {name}: compiled")
            benchmark.run(print_data=True)
            timed[path] = times
        if args.profile:
            for config in (configs[0], configs[-1]):
                tables.write_traces(times, config, folder / "traces")
    for path, times in timed.items():  # last, as the least important
        graph_times.add_graph_times(times, configs, workers[0])
        tables.write_table(path, times)
        say(f"{times.title}: {len(times.graph_us)} times by CUDA graph")
    forget_compiled()


if __name__ == "__main__":
    sys.exit(main())
