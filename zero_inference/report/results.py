"""What a run prints when it is done: what was generated, the log's four lines, and in words what stands beside them in the record."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from typing import Any

from zero_inference.errors import RunError
from zero_inference.measure import steadiness
from zero_inference.quality import evaluate as quality
from zero_inference.records.key import as_mapping
from zero_inference.records.limit import Limit, LinkUse, TracedLinkUse
from zero_inference.records.loops import ExpertUse, MovedPerStep
from zero_inference.records.run_log import RunLog
from zero_inference.records.schema import DecodeGraph, Result
from zero_inference.runtime import signals
from zero_inference.runtime.amounts import amount
from zero_inference.runtime.text import printable
from zero_inference.utils import GB

SHOWN_TEXTS = 3


def publish(
    files: RunLog, output_ids: Any, tokenizer: Any, before: Callable[[], None], ends: Collection[int] = ()
) -> None:
    """Print and write the results of a run that went well. On the screen first: it is what stays where the files cannot be written.

    Args:
        output_ids: int64 [batch, gen_len].
        tokenizer: None shows no texts.
        ends: ids that end a text.
        before: called first; what it raises does not keep the files from being written.

    Raises:
        RunError: something could not be written, or not be printed.
    """
    unprinted: BaseException | None = None
    try:
        before()
        if tokenizer is not None:
            print_texts(output_ids, tokenizer, ends)
        print_results(files.block(), files.result)
    except BaseException as error:  # a reader that is gone, or a signal: the files come first
        unprinted = error
    with signals.held():
        files.write()
    if files.unwritten:
        raise RunError("; ".join(files.unwritten) + ("." if unprinted else ", but what was measured is on stdout."))
    if isinstance(unprinted, OSError) and not isinstance(unprinted, BrokenPipeError):
        raise RunError(
            f"the results could not be printed ({unprinted.strerror}); they are in {files.log} and {files.record}."
        )
    if unprinted:
        raise unprinted
    print(printable(f"log: {files.log}\nrecord: {files.record}"), flush=True)


def print_texts(output_ids: Any, tokenizer: Any, ends: Collection[int] = ()) -> None:
    """The first of the generated texts, each up to the first id of `ends`; `output_ids` int64 [batch, gen_len]."""
    for number, row in enumerate(output_ids[:SHOWN_TEXTS]):
        ids = row.tolist()
        length = next((place for place, token in enumerate(ids) if token in ends), len(ids))
        text = tokenizer.decode(ids[:length], skip_special_tokens=True).strip()
        print(f"[{number}] {printable(text)}")
    hidden = len(output_ids) - SHOWN_TEXTS
    print(f"(and {hidden} more)\n" if hidden > 0 else "", flush=True)


def print_results(block: str, result: Result) -> None:
    """`block` is the log's; `result` is that of a run that went well."""
    measured, engine, scored = result.measured, result.engine, result.quality
    assert measured is not None and engine is not None and scored is not None, "a run that failed has no results"
    print(block)
    if line := steadiness.in_words(measured.evenness, len(measured.loops)):
        print(line)
    on_gpu, to_device = measured.device == "cuda", measured.transfers.host_to_device_bytes_per_step
    if line := limit_in_words(measured.limit, measured.transfers, on_gpu):
        print(line)
    if on_gpu and measured.link_use:
        cores_multiply = bool(measured.transfers.cores_bytes_per_step)
        print(idle_in_words(measured.link_use, cores_multiply) or "the link was hardly ever idle")
    elif measured.device == "cpu" and to_device and not measured.transfers.cores_bytes_per_step:
        print(f"decode fetches {to_device / 1e9:.3f} GB a step; without a GPU there is no link to cross")
    if measured.transfers.cores_bytes_per_step:
        last = measured.loops[-1]  # what was moved is the last loop's
        planned = engine.stream.cores if engine.stream is not None else None
        measured_before = planned.of_step_gb_per_s if planned is not None else None
        print(cores_in_words(measured.transfers, last.decode_s / len(last.step_s), measured_before, on_gpu))
    if measured.experts is not None:
        print(experts_in_words(measured.experts))
    graph = engine.stream.decode_graph if engine.stream is not None else None
    if graph is not None and graph.tried:
        print(graph_in_words(graph, on_gpu))
    if engine.quantized_fraction is not None:
        print(f"quantized: {engine.quantized_fraction:.1%} of the weights, {measured.weight_bytes / GB:.3f} GB stored")
    for task, scores in (scored.by_task or {}).items():
        print(quality.in_words(task, as_mapping(scores)))
    sys.stdout.flush()


def limit_in_words(limit: Limit, moved: MovedPerStep, on_gpu: bool) -> str | None:
    """One line: what bounds a decode step here, and how near the run came. None where nothing does."""
    rates = limit.rates
    if limit.bound_by == "link":
        spread = " in the loops themselves" if rates.link_from == "loops" else f" +- {rates.link_spread / 2:.1%}"
        what = (
            f"moves {amount(moved.host_to_device_bytes_per_step or 0)} to the device a step ({rates.link_kind}: "
            f"{rates.link_gb_per_s:.1f} GB/s{spread})"
        )
    elif limit.bound_by == "link_and_cores":
        what = (
            f"moves {amount(moved.host_to_device_bytes_per_step or 0)} to the device a step (link: "
            f"{rates.link_beside_cores_gb_per_s or 0:.1f} GB/s beside the cores), multiplies {amount(moved.cores_bytes_per_step or 0)} "
            f"on the host's cores ({rates.cores_gb_per_s or 0:.1f} GB/s beside the link)"
        )
    elif limit.bound_by == "disk":
        what = f"reads {amount(moved.disk_read_bytes_per_step or 0)} a step from disk ({rates.disk_gb_per_s:.2f} GB/s)"
    elif limit.bound_by == "device_memory":
        memory = "device memory" if on_gpu else "this machine's memory"
        what = f"is bound by {memory} (copies at {rates.device_copy_gb_per_s:.1f} GB/s)"
    elif limit.bound_by == "matmul":
        what = f"is bound by matrix products ({rates.matmul_tflops:.2f} TFLOP/s)"
    else:
        return None
    return f"decode {what} and runs at {limit.fraction_of_limit:.1%} of that limit"


def cores_in_words(moved: MovedPerStep, step_s: float, cores_gb_per_s: float | None, on_gpu: bool) -> str:
    """One line: what went each way in a decode step of `step_s`, and how fast the cores were, beside what was measured before."""
    to_device, of_cores = moved.host_to_device_bytes_per_step or 0, moved.cores_bytes_per_step or 0
    copied = "copied to the device" if on_gpu else "fetched"
    line = f"each decode step: {amount(to_device)} {copied}, {amount(of_cores)} read by the host's cores"
    if not moved.cores_busy_s_per_step:
        return line
    busy = moved.cores_busy_s_per_step / step_s
    beside = "" if cores_gb_per_s is None else f" ({cores_gb_per_s:.1f} measured before, beside a busy link)"
    return f"{line} at {of_cores / moved.cores_busy_s_per_step / 1e9:.1f} GB/s{beside}, busy {busy:.0%} of the time"


def experts_in_words(use: ExpertUse) -> str:
    """One line: what the experts that device memory keeps were good for."""
    return (
        f"experts: {use.hit_rate:.1%} of the choices were on the device, {amount(use.saved_bytes_per_step)} a step not read from host "
        f"memory, {amount(use.loaded_bytes_per_step)} a step brought in"
    )


def graph_in_words(graph: DecodeGraph, on_gpu: bool) -> str:
    """One line: how a graph compared, or why there is none."""
    if graph.unused_because is not None:
        return f"decode steps are launched kernel by kernel: {graph.unused_because}"
    graph_ms, launched_ms = (1e3 * (seconds or 0) for seconds in (graph.graph_s, graph.launched_s))
    if not on_gpu:
        return f"without a GPU the decode step of a graph is called as it is: {graph_ms:.2f} ms, as usual {launched_ms:.2f} ms"
    graphs = "one CUDA graph" if graph.graphs == 1 else f"{graph.graphs} CUDA graphs"
    return f"a decode step as {graphs} took {graph_ms:.2f} ms, launched kernel by kernel {launched_ms:.2f} ms"


_HOST_LATE = {
    False: "host late: it asked too late for the next layer",
    True: "between a step's copies: the host's cores still worked, or Python asked too late for the next layer",
}


def idle_in_words(use: LinkUse | TracedLinkUse, cores_multiply: bool = False) -> str | None:
    """Where the rest of the link's time went, or None if there is hardly any.

    Args:
        cores_multiply: the host's cores have a part of the weights; the link may then wait for them.
    """
    if isinstance(use, TracedLinkUse):
        total = use.busy_s + use.idle_s
        return f"in the trace the link stood idle {use.idle_s / total:.1%} of the time" if total else None
    causes = {
        "waiting for a free slot: the device computes longer than a layer copies": use.slot_wait_s,
        "at the start of a step, while the host prepares it: a larger --ring-depth bridges that": use.step_start_s,
        _HOST_LATE[cores_multiply]: use.host_late_s,
    }
    total = use.busy_s + sum(causes.values())
    worst = max(causes, key=causes.__getitem__)
    if not total or causes[worst] < 0.02 * total:
        return None
    return f"the link stood idle {1 - use.busy_s / total:.1%} of the time, mostly {worst}"
