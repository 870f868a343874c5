"""Times by CUDA graph, and compiling ahead, in child processes: a capture may fail, and compilations run side by side.

Inputs, forward pass and backward pass are all on the stream that is captured. A backward node runs on the stream of its forward
operation, and that of a leaf on the stream that saw the leaf first; if this were the default stream, the capture would be lost, and
the process with it, because its random generator would stay in the capture.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .times import problem_of
from .worker import Worker, WorkerFailed, serve

GRAPH_BELOW_US = 100.0  # below it the host's part of a launch counts
REPLAYS = 20
REPLAY_MS, MAX_CALLS = 4.0, 100  # aimed-at length of a replay; most calls in it
ANSWER_S = 180.0  # includes the start of a process and a compilation


def make_workers(count: int, environment: Mapping[str, str] = os.environ) -> list[Worker]:
    """Start `count` child processes that answer this module's requests; they import torch while the caller continues."""
    folder = Path(__file__).resolve().parents[1]
    path = os.pathsep.join(filter(None, [str(folder), str(folder.parent), environment.get("PYTHONPATH")]))
    # one thread: starting a pool of compilers takes longer than compiling the few kernels of a child
    workers = [
        Worker(
            [sys.executable, "-m", "common.graph_times"],
            {**environment, "PYTHONPATH": path, "TORCHINDUCTOR_COMPILE_THREADS": "1"},
        )
        for _ in range(count)
    ]
    for worker in workers:
        worker.start()
    return workers


def compile_ahead(times, configs: list[tuple[int, int, int]], workers: list[Worker]) -> None:
    """Fill Inductor's cache on disk with what the providers of `times` compile for `configs`, with all `workers` in parallel.

    What is missing is compiled when it is timed, so that a failure costs only time.
    """
    sizes = sorted({(dim, 1, rows) for dim, rows in map(problem_of, configs)})
    compiled = [provider for provider in times.providers if provider.startswith("compiled")]
    requests = [request("compile", times, size, provider) for size in sizes for provider in compiled]

    def share_of(index: int) -> None:
        for one in requests[index :: len(workers)]:
            try:
                workers[index].ask(one, ANSWER_S)
            except WorkerFailed as failure:
                print(f"note: not compiled ahead, {one['provider']} at {one['config']}: {failure}", file=sys.stderr)
                return  # it may fail each time, and each time a process has to start

    with ThreadPoolExecutor(len(workers)) as threads:
        list(threads.map(share_of, range(len(workers))))


def add_graph_times(times, configs: list[tuple[int, int, int]], worker: Worker) -> None:
    """Fill `times.graph_us` for all providers of each size at which one took less than GRAPH_BELOW_US: there another's time may be mostly
    a slow launch. A provider that failed once is not asked again."""
    failed = set()
    known: dict[tuple[tuple[int, int], str], float] = {}
    for config in configs:
        taken = {provider: times.us[config, provider] for provider in times.providers}
        if not any(us < GRAPH_BELOW_US for us in taken.values()):
            continue
        for provider, us in taken.items():
            problem = problem_of(config), provider
            if problem in known:
                times.graph_us[config, provider] = known[problem]
            if problem in known or provider in failed or math.isnan(us):
                continue
            try:
                known[problem] = times.graph_us[config, provider] = worker.ask(
                    request("graph", times, config, provider), ANSWER_S
                )
            except WorkerFailed as failure:
                failed.add(provider)
                print(
                    f"note: no CUDA-graph times of {provider}, {times.title}, from {config} on: {failure}",
                    file=sys.stderr,
                )


def request(what: str, times, config: tuple[int, int, int], provider: str) -> dict[str, Any]:
    """Return the request for `answer`; `what` is "compile" or "graph"."""
    return {
        "what": what,
        "case": times.case.name,
        "dtype": str(times.dtype).removeprefix("torch."),
        "eps": times.eps,
        "peers": times.peers,
        "backward": times.backward,
        "config": config,
        "provider": provider,
    }


def answer(asked: dict[str, Any]) -> float | None:
    """Answer a request in the child: compile a forward and a backward pass, or return the microseconds of a pass by CUDA graph."""
    import torch
    from cases import CASES

    from .times import Times

    backward = asked["backward"] or asked["what"] == "compile"  # a backward pass includes the forward one
    times = Times(CASES[asked["case"]], getattr(torch, asked["dtype"]), asked["eps"], asked["peers"], backward)
    config, us = tuple(asked["config"]), None
    if asked["what"] == "compile":
        times.call(config, asked["provider"])()
    else:
        with torch.cuda.stream(_stream()):
            us = time_by_graph(times.call(config, asked["provider"]))
    del times
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return us


def time_by_graph(call: Callable[[], Any]) -> float:
    """Return the median microseconds of a call, over REPLAYS replays of a graph of up to MAX_CALLS calls on the current stream.

    The L2 cache stays warm. `call` and all that it reaches must have run on this stream only.
    """
    import torch

    stream = torch.cuda.current_stream()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(3):  # compiles, loads kernels, asks the allocator
        call()
    start.record()
    for _ in range(5):
        call()
    end.record()
    end.synchronize()
    calls = min(MAX_CALLS, max(1, int(REPLAY_MS * 5 / start.elapsed_time(end))))
    graph = torch.cuda.CUDAGraph()
    # thread_local: CUDA calls of other threads, such as a compiler's, do not end this capture
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(calls):
            call()
    graph.replay()
    spent_ms = []
    for _ in range(REPLAYS):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        spent_ms.append(start.elapsed_time(end))
    return statistics.median(spent_ms) / calls * 1e3


_STREAMS: list[Any] = []


def _stream():
    """Return the side stream of this process, always the same one."""
    import torch

    if not _STREAMS:
        _STREAMS.append(torch.cuda.Stream())
    return _STREAMS[0]


if __name__ == "__main__":
    import cases  # noqa: F401
    import torch._inductor.compile_fx  # noqa: F401

    serve(answer)
