"""The output of a run: generated texts, a table of times, sizes, the roofline, and what would be faster."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Callable, Collection, Sequence
from typing import Any

from zero_inference.config.options import QUANT_BITS, QUANTIZING_ENGINES
from zero_inference.errors import RunError
from zero_inference.measure import steadiness
from zero_inference.quality import evaluate as quality
from zero_inference.records.hardware import LinkUse, TracedLinkUse
from zero_inference.records.schema import (
    CpuBackendUse,
    DecodeGraph,
    EngineFacts,
    ExpertUse,
    Measured,
    Request,
    Result,
    SpeculationUse,
)
from zero_inference.records.write import RunLog
from zero_inference.report.run import model_in_short, processors_in_short, weights_in_short
from zero_inference.utils import processes
from zero_inference.utils.format import (
    Column,
    format_bytes,
    one_line,
    printable,
    terminal_table,
    texts_of,
    three_digits,
)

SHOWN_TEXTS = 3
SHOWN_POSITIONS = 4  # of proposals
WIDEST = 100  # columns, of what a run prints
NEAR_THE_LIMIT = 0.9  # from here on only fewer bytes help
FAR_FROM_THE_LIMIT = 0.7


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
            f"the results could not be printed ({unprinted.strerror}); they are in {files.log} and {files.record_path}."
        )
    if unprinted:
        raise unprinted
    print(printable(f"log: {files.log}\nrecord: {files.record_path}"), flush=True)


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
    measured, engine = result.measured, result.engine
    on_terminal = sys.stdout.isatty()
    width = min(WIDEST, shutil.get_terminal_size().columns) if on_terminal else WIDEST
    weights = weights_in_short(request.quant_bits, request.dtype, stored_format=request.stored_format)
    lengths = [f"batch {request.batch_size}", f"prompt {request.prompt_len}", f"{request.gen_len} generated"]
    parts = [weights, processors_in_short(request.num_gpus, request.world_size), *lengths]
    print(printable(", ".join([model_in_short(request.model), request.engine, *filter(None, parts)])))
    print(times_table(measured, on_terminal, width), end="")
    on_gpu, moved, stream = measured.device == "cuda", measured.transfers, engine.stream
    waits_for_disk = measured.limit.bound_by == "disk"
    lines = [
        sizes_in_words(request, measured, engine),
        limit_in_words(measured),
        faster_in_words(request, measured),
        idle_in_words(measured.link_use, bool(moved.cores_bytes_per_step)) if on_gpu and not waits_for_disk else None,
        *gpus_in_words(measured),
        cpu_in_words(measured, stream.cores) if stream else None,
        experts_in_words(measured.experts),
        speculation_in_words(measured.speculation),
        baseline_in_words(measured.speculation),
        graph_in_words(stream.decode_graph, on_gpu) if stream else None,
        graph_in_words(stream.pass_graph, on_gpu, "pass") if stream else None,
        steadiness.describe_slow_step(measured.spread),
    ]
    scores = {task: scores for task, scores in result.quality.by_task or () if scores is not None}
    lines += [quality.format_scores(task, each.as_dict()) for task, each in scores.items()]
    for line in filter(None, lines):
        print(textwrap.fill(printable(line), width, subsequent_indent="  ", break_long_words=False))
    sys.stdout.flush()


def limit_in_words(measured: Measured) -> str | None:
    """Return the fraction of the roofline that decoding reached, and what bounds it; None if nothing does."""
    limit, rates, moved = measured.limit, measured.limit.rates, measured.transfers

    def step(nbytes: float | None) -> str:
        return f"{format_bytes(nbytes or 0)} a step"

    def rate(value: float | None) -> str:
        return f"{three_digits(value or 0)} GB/s"

    copied, computed = step(moved.host_to_device_bytes_per_step), format_bytes(moved.cores_bytes_per_step or 0)
    source = "measured in the loops" if rates.link_from == "loops" else f"+- {(rates.link_spread or 0) / 2:.1%}"
    disk_alone = rates.disk_alone_gb_per_s or rates.disk_gb_per_s  # older records lack the first
    memory = "host memory" if measured.device == "cpu" else "device memory"
    words = {
        "link": f"the link's limit: {copied} at {rate(rates.link_gb_per_s)} ({rates.link_kind}, {source})",
        "link_and_cores": f"the limit of link and CPU: {copied} over the link "
        f"({rate(rates.link_beside_cores_gb_per_s)}) and {computed} by the CPU ({rate(rates.cores_gb_per_s)})",
        "disk": f"the disk's limit: {step(moved.disk_read_bytes_per_step)} at {rate(rates.disk_gb_per_s)}"
        + f" (measured in the loops; reads alone: {rate(disk_alone)})" * (disk_alone != rates.disk_gb_per_s),
        "device_memory": f"the limit of {memory}, which copies {rate(rates.device_copy_gb_per_s)}",
        "matmul": f"the limit of matrix products: {three_digits(rates.matmul_tflops or 0)} TFLOP/s",
    }.get(limit.bound_by or "")
    return words and f"{limit.fraction_of_limit or 0:.1%} of {words}"


def faster_in_words(request: Request, measured: Measured) -> str | None:
    """Return the options that would make decoding on a GPU faster, by what bounds it; None where the record shows none."""
    share, bound = measured.limit.fraction_of_limit, measured.limit.bound_by
    if share is None or measured.device != "cuda":
        return None
    near, far = share >= NEAR_THE_LIMIT, share < FAR_FROM_THE_LIMIT
    link, disk, compute = bound == "link", bound == "disk", bound in ("device_memory", "matmul")
    quantizable = request.engine in QUANTIZING_ENGINES and (request.quant_bits or 0) > min(QUANT_BITS)
    without_cpu = request.engine == "stream" and request.cpu_compute in ("off", "0") and request.world_size == 1
    whole_modules = request.engine in ("deepspeed", "accelerate")
    found = [
        (link and request.cpu_offload and request.pin_memory is False, "--pin-memory 1"),
        (link and far and whole_modules, "--engine stream (copies while it computes)"),
        (near and quantizable, f"--quant-bits {min(QUANT_BITS)}"),
        (near and link and without_cpu, "--cpu-compute auto"),
        (near and disk and request.engine == "stream", "a larger --host-memory or --gpu-memory"),
        (near and disk and request.engine != "stream", "--cpu-offload (if host memory is large enough)"),
        ((near or far and compute) and not request.kv_offload, "a larger --batch-size"),
    ]
    options = [text for holds, text in found if holds]
    return f"faster: {', '.join(options)}" if options else None


def cpu_in_words(measured: Measured, planned: CpuBackendUse | None) -> str | None:
    """Return the bytes that the CPU backend reads in a decode step of the last loop, its rate and the planned one."""
    moved = measured.transfers
    if not moved.cores_bytes_per_step:
        return None
    line = f"each step: {format_bytes(moved.host_to_device_bytes_per_step or 0)} copied to the device, "
    line += f"{format_bytes(moved.cores_bytes_per_step)} read by the CPU"
    if moved.cores_busy_s_per_step:
        line += f" at {three_digits(moved.cores_bytes_per_step / moved.cores_busy_s_per_step / 1e9)} GB/s"
        if planned is not None and planned.of_step_gb_per_s is not None:
            line += f" (planned: {three_digits(planned.of_step_gb_per_s)})"
        last = measured.loops[-1]
        line += f", busy {moved.cores_busy_s_per_step * len(last.step_s) / last.decode_s:.0%}"
    return line


def experts_in_words(use: ExpertUse | None) -> str | None:
    """Return the hit rate of the expert cache, and the bytes that it saved and fetched; None without one."""
    if use is None:
        return None
    on_disk = "" if use.host_hit_rate is None else f"; of the others {use.host_hit_rate:.1%} in host memory"
    return (
        f"expert cache: {use.hit_rate:.1%} hits, {format_bytes(use.saved_bytes_per_step)} a step saved, "
        f"{format_bytes(use.fetched_bytes_per_step)} fetched{on_disk}"
    )


def speculation_in_words(use: SpeculationUse | None) -> str | None:
    """Return the tokens of a pass, the acceptance of its first proposals, and the time of drafts; None without speculation."""
    if use is None or use.tokens_per_pass is None:
        return None
    acceptance = ", ".join("-" if each is None else f"{each:.0%}" for each in use.acceptance[:SHOWN_POSITIONS])
    words = (
        f"speculation: {use.tokens_per_pass:.2f} tokens a pass in {use.passes} passes, proposals accepted by position: {acceptance}; "
        f"drafts {three_digits(use.draft_s)} s, passes {three_digits(use.verify_s)} s"
    )
    return words + "; turned off, because passes without proposals were faster" * use.turned_off


def baseline_in_words(use: SpeculationUse | None) -> str | None:
    """Return the speed without speculation, and by how little tokens differ; None if it was not measured."""
    baseline = None if use is None else use.baseline
    if baseline is None:
        return None
    words = "without speculation"
    if baseline.gain is not None and baseline.decode_throughput is not None:
        words += (
            f" {three_digits(baseline.decode_throughput)} token/s: this is {three_digits(baseline.gain)} times as fast"
        )
    if not baseline.differences:
        return f"{words}; all tokens are the same"
    worst = max(baseline.differences, key=lambda each: each.margin / each.spacing)
    return (
        f"{words}; {baseline.agreement:.1%} of the tokens precede the first difference of their sequence, at which both tokens are within "
        f"{three_digits(worst.margin)} of the largest logit (spacing of the dtype there: {three_digits(worst.spacing)})"
    )


def graph_in_words(graph: DecodeGraph | None, on_gpu: bool, step: str = "decode step") -> str | None:
    """Return the times of a step with and without a CUDA graph, or why there is no graph; None if none was tried."""
    if graph is None or not graph.tried:
        return None
    if graph.unused_because is not None:
        return f"each {step} is computed eagerly: {graph.unused_because}"
    graph_ms, launched_ms = (three_digits(1e3 * (seconds or 0)) for seconds in (graph.graph_s, graph.launched_s))
    if not on_gpu:
        return f"no CUDA graph without a GPU: a {step} in its graph form took {graph_ms} ms, as usual {launched_ms} ms"
    graphs = "one CUDA graph" if graph.graphs == 1 else f"{graph.graphs} CUDA graphs"
    return f"a {step} took {graph_ms} ms as {graphs}, {launched_ms} ms launched kernel by kernel"


def idle_in_words(use: LinkUse | TracedLinkUse | None, cpu_computes: bool = False) -> str | None:
    """Return the share of time that the link was idle, and the main cause; None if it was busy or not observed."""
    if use is None:
        return None
    if isinstance(use, TracedLinkUse):
        total = use.busy_s + use.idle_s
        return f"the link was idle {use.idle_s / total:.1%} of the time, by the trace" if total else None
    cpu = "the CPU was still working, or " if cpu_computes else ""
    causes = {
        "because the device computes longer than a layer copies": use.slot_wait_s,
        "at the start of a step: try a larger --ring-depth": use.step_start_s,
        f"because {cpu}the host asked too late for the next layer": use.host_late_s,
    }
    worst = max(causes, key=causes.__getitem__)
    if causes[worst] <= 0.02 * (use.busy_s + sum(causes.values())):
        return None
    return f"the link was idle {1 - use.busy_share:.1%} of the time, mostly {worst}"


def gpus_in_words(measured: Measured) -> list[str]:
    """Return a line for each of several GPUs: its peak memory, the bytes over its link and how busy that was; none for one GPU."""
    lines, fetches = [], bool(measured.experts and measured.experts.fetched_bytes_per_step)
    for gpu in measured.gpus or ():
        parts = [] if gpu.peak_bytes is None else [f"peak {format_bytes(gpu.peak_bytes)}"]
        if gpu.weight_bytes is not None:
            parts.append(f"{format_bytes(gpu.weight_bytes)} of weights stay")
        if gpu.host_to_device_bytes_per_step is not None:
            rate = three_digits(gpu.link_gb_per_s_while_busy or 0)
            parts.append(
                f"{format_bytes(gpu.host_to_device_bytes_per_step)} a step{', without fetched experts,' * fetches} "
                f"over its link at {rate} GB/s, busy {gpu.link_busy_share or 0:.1%}"
            )
        lines.append(f"GPU {gpu.index}: {', '.join(parts) or 'nothing is known'}")
    return lines


def times_table(measured: Measured, colour: bool = False, width: int | None = None) -> str:
    """Return time to first token, decode and total as a table that ends in a newline."""
    steps, loops = len(measured.loops[-1].step_s), len(measured.loops)
    names = {"prefill": "time to first token (prefill)", "decode": f"decode ({steps} steps)", "total": "total"}
    rows = []
    for phase, name in names.items():
        if phase == "decode" and not steps:
            continue
        times_s = [getattr(loop, f"{phase}_s") for loop in measured.loops]
        rows.append({
            "phase": name,
            "median_s": getattr(measured, f"{phase}_latency_s"),
            "range_s": f"{three_digits(min(times_s))} to {three_digits(max(times_s))}",
            "throughput": getattr(measured, f"{phase}_throughput"),
            "predicted_s": _predicted_in_words(measured, ["prefill", "decode"] if phase == "total" else [phase]),
        })  # fmt: skip
    columns = [
        Column("phase", f"median of {loops} loops" if loops > 1 else "1 loop", dtype="string", whole=True),
        Column("median_s", "seconds", three_digits),
        *[Column("range_s", "min to max", one_line, whole=True)] * (loops > 1),
        Column("throughput", "token/s", three_digits),
        *[Column("predicted_s", "predicted (s)", one_line, whole=True)] * any(row["predicted_s"] for row in rows),
    ]
    return terminal_table(columns, texts_of(rows, columns), colour, width)


def _predicted_in_words(measured: Measured, phases: Sequence[str]) -> str | None:
    """Return a text such as "0.220 (0.187 to 0.242)", the sum over `phases`."""
    times_s = [getattr(measured.predicted, f"{phase}_s", None) for phase in phases]
    if None in times_s:
        return None
    ranges_s = [getattr(measured.predicted, f"{phase}_range_s") for phase in phases]
    within = "" if None in ranges_s else f" ({' to '.join(three_digits(sum(ends)) for ends in zip(*ranges_s))})"
    return f"{three_digits(sum(times_s))}{within}"


def sizes_in_words(request: Request, measured: Measured, engine: EngineFacts) -> str:
    """Return the sizes of the run on one line."""
    share, weights = engine.quantized_fraction, request.stored_format or f"int{request.quant_bits}"
    parts = [
        ("model", measured.model_bytes, " at 16 bits"),
        ("stored", measured.weight_bytes, "" if share is None else f" ({share:.1%} {weights})"),
        ("KV cache", measured.cache_bytes, ""),
        ("peak GPU", measured.peak_gpu_bytes, ""),
        ("peak host", measured.peak_host_bytes, ""),
    ]
    return ", ".join(f"{name} {format_bytes(size)}{more}" for name, size, more in parts if size is not None)
