"""The output of a run: generated texts, a table of times, sizes, the roofline, and explanations of slowness."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from zero_inference.errors import RunError
from zero_inference.measure import steadiness
from zero_inference.quality import evaluate as quality
from zero_inference.records.hardware import Limit, LinkUse, TracedLinkUse
from zero_inference.records.schema import (
    DecodeGraph,
    EngineFacts,
    ExpertUse,
    Measured,
    MovedPerStep,
    Predicted,
    Request,
    Result,
)
from zero_inference.records.write import RunLog
from zero_inference.report.advice import advice, advice_far_from_limit
from zero_inference.report.run import model_in_short, weights_in_short
from zero_inference.utils import processes
from zero_inference.utils.format import GIB, LEAST_OF_UNIT, format_bytes, one_line, printable, three_digits
from zero_inference.utils.tables import Column, terminal_table, texts_of

LEAST_SHARE = 0.001  # that is shown as a figure
SHOWN_TEXTS = 3


def publish(
    files: RunLog,
    output_ids: Any,
    tokenizer: Any,
    before: Callable[[], None],
    ends: Collection[int] = (),
    prompts: Sequence[str] = (),
) -> None:
    """Print and write the results of a run that went well. Printed first, so that they are seen even if the files cannot be written.

    Args:
        output_ids: int64 [batch, gen_len].
        tokenizer: None shows no texts.
        ends: ids that end a text.
        prompts: in short, of each row.
        before: called first; the files are written even if it raises.

    Raises:
        RunError: something could not be written or printed.
    """
    unprinted: BaseException | None = None
    try:
        before()
        if tokenizer is not None:
            print_texts(output_ids, tokenizer, ends, prompts)
        print_results(files.request, files.result)
    except BaseException as error:  # a reader that is gone, or a signal: the files come first
        unprinted = error
    with processes.defer_signals():
        files.write()
    if files.unwritten:
        raise RunError("; ".join(files.unwritten) + ("." if unprinted else "; the results are on stdout only."))
    if isinstance(unprinted, OSError) and not isinstance(unprinted, BrokenPipeError):
        raise RunError(
            f"the results could not be printed ({unprinted.strerror}); they are in {files.log} and {files.record}."
        )
    if unprinted:
        raise unprinted
    print(printable(f"log: {files.log}\nrecord: {files.record}"), flush=True)


def print_texts(output_ids: Any, tokenizer: Any, ends: Collection[int] = (), prompts: Sequence[str] = ()) -> None:
    """Print the first generated texts after their prompts, each up to the first id of `ends`; `output_ids` int64 [batch, gen_len]."""
    for number, text in enumerate(texts_of_ids(output_ids[:SHOWN_TEXTS], tokenizer, ends)):
        prompt = f"{prompts[number]} -> " if prompts else ""
        print(f"[{number}] {printable(prompt + text.strip())}")
    hidden = len(output_ids) - SHOWN_TEXTS
    print(f"(and {hidden} more)\n" if hidden > 0 else "", flush=True)


def texts_of_ids(output_ids: Any, tokenizer: Any, ends: Collection[int]) -> list[str]:
    """Return the text of each row of `output_ids`, int64 [batch, gen_len], up to the first id of `ends`."""
    texts = []
    for ids in output_ids.tolist():
        length = next((place for place, token in enumerate(ids) if token in ends), len(ids))
        texts.append(tokenizer.decode(ids[:length], skip_special_tokens=True))
    return texts


def print_results(request: Request, result: Result) -> None:
    """Print the results of a run that succeeded."""
    measured, engine, scored = result.measured, result.engine, result.quality
    assert measured is not None and engine is not None and scored is not None, "a run that failed has no results"
    width = line_width()
    print(printable(run_in_words(request)))
    print(times_table(measured, colour=sys.stdout.isatty(), width=width), end="")
    lines = [sizes_in_words(request, measured, engine), *_explanations(request, result)]
    lines += [
        quality.format_scores(task, scores.as_dict()) for task, scores in scored.by_task or () if scores is not None
    ]
    for line in lines:
        print(textwrap.fill(printable(line), width, subsequent_indent="  ", break_long_words=False))
    sys.stdout.flush()


def _explanations(request: Request, result: Result) -> Iterator[str]:
    """Yield a line each about the roofline of decoding, what would help, and what explains slowness."""
    measured, engine = result.measured, result.engine
    assert measured is not None and engine is not None
    on_gpu, moved = measured.device == "cuda", measured.transfers
    what_else = advice_far_from_limit(request, measured)
    share_says_more = not what_else or (on_gpu and measured.limit.bound_by == "device_memory")
    if share_says_more and (line := limit_in_words(measured.limit, moved, on_gpu)):
        yield line
    yield from what_else
    yield from advice(request, measured)
    if on_gpu and measured.link_use:
        if line := idle_in_words(measured.link_use, bool(moved.cores_bytes_per_step)):
            yield line
    elif measured.device == "cpu" and moved.host_to_device_bytes_per_step and not moved.cores_bytes_per_step:
        how = "copies" if engine.stream is not None else "uses"  # others use weights where they are
        yield f"decode {how} {format_bytes(moved.host_to_device_bytes_per_step)} a step within host memory: there is no GPU"
    if moved.cores_bytes_per_step:
        last = measured.loops[-1]  # what was moved is the last loop's
        planned = engine.stream.cores if engine.stream is not None else None
        planned_rate = planned.of_step_gb_per_s if planned is not None else None
        yield cores_in_words(moved, last.decode_s / len(last.step_s), planned_rate, on_gpu)
    if measured.experts is not None:
        yield experts_in_words(measured.experts)
    graph = engine.stream.decode_graph if engine.stream is not None else None
    if graph is not None and graph.tried:
        yield graph_in_words(graph, on_gpu)
    if line := steadiness.describe_slow_step(measured.evenness):
        yield line


def limit_in_words(limit: Limit, moved: MovedPerStep, on_gpu: bool) -> str | None:
    """Return the fraction of the roofline that decoding reached, and what bounds it; None if nothing does."""
    rates = limit.rates
    if limit.bound_by == "link":
        in_loops = rates.link_from == "loops"
        spread, source = ("", ", measured in the loops") if in_loops else (f" +- {rates.link_spread / 2:.1%}", "")
        name = "the link's limit"
        detail = (
            f"{format_bytes(moved.host_to_device_bytes_per_step or 0)} a step at {three_digits(rates.link_gb_per_s)} GB/s{spread} "
            f"({rates.link_kind}{source})"
        )
    elif limit.bound_by == "link_and_cores":
        name = "the limit"
        detail = (
            f"{format_bytes(moved.host_to_device_bytes_per_step or 0)} a step over the link "
            f"({three_digits(rates.link_beside_cores_gb_per_s or 0)} GB/s) and {format_bytes(moved.cores_bytes_per_step or 0)} "
            f"on the host's cores ({three_digits(rates.cores_gb_per_s or 0)} GB/s)"
        )
    elif limit.bound_by == "disk":
        read = format_bytes(moved.disk_read_bytes_per_step or 0)
        name, detail = "the disk's limit", f"{read} a step at {three_digits(rates.disk_gb_per_s)} GB/s"
    elif limit.bound_by == "device_memory":
        memory = "device memory" if on_gpu else "this machine's memory"
        name, detail = f"the limit of {memory}", f"copies at {three_digits(rates.device_copy_gb_per_s)} GB/s"
    elif limit.bound_by == "matmul":
        name, detail = "the limit of matrix products", f"{three_digits(rates.matmul_tflops)} TFLOP/s"
    else:
        return None
    share = limit.fraction_of_limit or 0.0
    return f"{f'{share:.1%}' if share >= LEAST_SHARE else 'less than 0.1%'} of {name}: {detail}"


def cores_in_words(moved: MovedPerStep, step_s: float, cores_gb_per_s: float | None, on_gpu: bool) -> str:
    """Return the bytes that the CPU backend reads in a decode step of `step_s`, its rate and the planned one."""
    to_device, of_cores = moved.host_to_device_bytes_per_step or 0, moved.cores_bytes_per_step or 0
    copied = "copied to the device" if on_gpu else "fetched"
    line = f"each step: {format_bytes(to_device)} {copied}, {format_bytes(of_cores)} read by the host's cores"
    if not moved.cores_busy_s_per_step:
        return line
    busy = moved.cores_busy_s_per_step / step_s
    planned = "" if cores_gb_per_s is None else f" (planned: {three_digits(cores_gb_per_s)})"
    return f"{line} at {three_digits(of_cores / moved.cores_busy_s_per_step / 1e9)} GB/s{planned}, busy {busy:.0%}"


def experts_in_words(use: ExpertUse) -> str:
    """Return the hit rate of the expert cache, and the bytes that it saved and fetched."""
    return (
        f"experts: {use.hit_rate:.1%} of those chosen were on the device; {format_bytes(use.saved_bytes_per_step)} a step "
        f"saved, {format_bytes(use.fetched_bytes_per_step)} fetched"
    )


def graph_in_words(graph: DecodeGraph, on_gpu: bool) -> str:
    """Return the times of a step with and without a CUDA graph, or why there is no graph."""
    if graph.unused_because is not None:
        return f"decode steps are launched kernel by kernel: {graph.unused_because}"
    graph_ms, launched_ms = (three_digits(1e3 * (seconds or 0)) for seconds in (graph.graph_s, graph.launched_s))
    if not on_gpu:
        return f"no CUDA graph without a GPU: a step in its graph form took {graph_ms} ms, as usual {launched_ms} ms"
    graphs = "one CUDA graph" if graph.graphs == 1 else f"{graph.graphs} CUDA graphs"
    return f"a decode step took {graph_ms} ms as {graphs}, {launched_ms} ms launched kernel by kernel"


def idle_in_words(use: LinkUse | TracedLinkUse, cpu_computes: bool = False) -> str | None:
    """Return the share of time that the link was idle, and the main cause; None if it was busy.

    Args:
        cpu_computes: the CPU computes some blocks, and the link may wait for it.
    """
    if isinstance(use, TracedLinkUse):
        total = use.busy_s + use.idle_s
        return f"the link was idle {use.idle_s / total:.1%} of the time, by the trace" if total else None
    host_late = "because the host asked too late for the next layer"
    if cpu_computes:
        host_late = "because the host's cores were still working, or the host asked too late"
    causes = {
        "because the device computes longer than a layer copies": use.slot_wait_s,
        "at the start of a step: try a larger --ring-depth": use.step_start_s,
        host_late: use.host_late_s,
    }
    total = use.busy_s + sum(causes.values())
    worst = max(causes, key=causes.__getitem__)
    if not total or causes[worst] < 0.02 * total:
        return None
    return f"the link was idle {1 - use.busy_s / total:.1%} of the time, mostly {worst}"


WIDEST = 100  # columns, of what a run prints


def line_width() -> int:
    """Return the width of the terminal, at most `WIDEST`."""
    return min(WIDEST, shutil.get_terminal_size().columns) if sys.stdout.isatty() else WIDEST


def run_in_words(request: Request) -> str:
    """Return model, engine, weights, batch and lengths on one line."""
    weights = weights_in_short(request.quant_bits, request.dtype)
    ranks = [f"{request.world_size} ranks"] * (request.world_size > 1)
    lengths = [f"batch {request.batch_size}", f"prompt {request.prompt_len}", f"{request.gen_len} generated"]
    return ", ".join([model_in_short(request.model), request.engine, weights or "", *ranks, *lengths])


def times_table(measured: Measured, colour: bool = False, width: int | None = None) -> str:
    """Return time to first token, decode and total as a table that ends in a newline."""
    rows = _rows(measured)
    loops = len(measured.loops)
    columns = [
        Column("phase", f"median of {loops} loops" if loops > 1 else "1 loop", dtype="string", whole=True),
        Column("median_s", "seconds", three_digits),
        *[Column("range_s", "min to max", one_line, whole=True)] * (loops > 1),
        Column("throughput", "token/s", three_digits),
        *[Column("predicted_s", "predicted (s)", one_line, whole=True)] * any(row["predicted_s"] for row in rows),
    ]
    return terminal_table(columns, texts_of(rows, columns), colour, width)


def _rows(measured: Measured) -> list[dict[str, Any]]:
    steps = len(measured.loops[-1].step_s)
    phases = {
        "prefill": ("time to first token (prefill)", ["prefill"]),
        "decode": (f"decode ({steps} step{'s' * (steps != 1)})", ["decode"]),
        "total": ("total", ["prefill", "decode"]),
    }
    return [
        {
            "phase": name,
            "median_s": getattr(measured, f"{phase}_latency_s"),
            "range_s": f"{three_digits(min(times_s))} to {three_digits(max(times_s))}",
            "throughput": getattr(measured, f"{phase}_throughput"),
            "predicted_s": None if measured.predicted is None else _predicted_in_words(measured.predicted, parts),
        }
        for phase, (name, parts) in phases.items()
        if phase != "decode" or steps
        for times_s in [[getattr(loop, f"{phase}_s") for loop in measured.loops]]
    ]


def _predicted_in_words(predicted: Predicted, phases: Sequence[str]) -> str | None:
    """Return such as "0.220 (0.187 to 0.242)", the sum over `phases`."""
    times_s = [getattr(predicted, f"{phase}_s") for phase in phases]
    ranges_s = [getattr(predicted, f"{phase}_range_s") for phase in phases]
    if None in times_s:
        return None
    within = "" if None in ranges_s else f" ({' to '.join(three_digits(sum(ends)) for ends in zip(*ranges_s))})"
    return f"{three_digits(sum(times_s))}{within}"


def sizes_in_words(request: Request, measured: Measured, engine: EngineFacts) -> str:
    """Return the sizes of the run on one line: in GiB, or each in its own unit where one of them is small."""
    share, bits = engine.quantized_fraction, f"int{request.quant_bits}"
    if request.quant_bits != 8 and engine.stream is not None and engine.stream.head_bits:
        bits += f" and int{engine.stream.head_bits}"
    parts = [
        ("model", measured.model_bytes, " at 16 bits"),
        ("stored", measured.weight_bytes, "" if share is None else f" ({share:.1%} {bits})"),
        ("KV cache", measured.cache_bytes, ""),
        ("peak GPU", measured.peak_gpu_bytes, ""),
        ("peak host", measured.peak_host_bytes, ""),
    ]
    known = [(name, size, more) for name, size, more in parts if size is not None]
    if any(0 < size < LEAST_OF_UNIT * GIB for _, size, _ in known):
        return ", ".join(f"{name} {format_bytes(size)}{more}" for name, size, more in known)
    return f"GiB: {', '.join(f'{name} {three_digits(size / GIB)}{more}' for name, size, more in known)}"
