"""The record of a run, one line of a .jsonl file: every key with its unit and meaning (hardware.py and scores.py have the rest).

Schema 1: keys of bytes a second end in `gbps` and mean GB/s of 1e9 bytes; the attributes say `gb_per_s`.
`zero-inference report --fields` and docs/record.md print what stands here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from pydantic import ConfigDict, Field, model_validator

from zero_inference.config.options import ENGINES
from zero_inference.records.field import Number, Part, inline, key, required_keys
from zero_inference.records.hardware import Environment, Limit, LinkUse, Rates, TracedLinkUse
from zero_inference.records.scores import Tasks


class MovedPerStep(Part):
    """Bytes moved per decode step, counted, and busy time of the CPU backend; null without a decode step."""

    host_to_device_bytes_per_step: Number | None = key(
        "byte", "weights, KV cache, and results of the host's cores", required="when measured"
    )
    device_to_host_bytes_per_step: Number | None = key("byte", "KV cache, and inputs for the host's cores")
    disk_read_bytes_per_step: Number | None = key("byte", "weights read from disk", required="when measured")
    cores_bytes_per_step: Number | None = key(
        "byte", "weights and KV cache that the host's cores read in host memory", default=None
    )
    cores_busy_s_per_step: float | None = key(
        "s", "time the host's cores were computing; the rest of the step they waited for the device", default=None
    )

    @classmethod
    def unknown(cls) -> MovedPerStep:
        return cls(
            host_to_device_bytes_per_step=None, device_to_host_bytes_per_step=None, disk_read_bytes_per_step=None
        )


class ExpertUse(Part):
    """Use of the expert cache in the decode steps, counted."""

    hit_rate: float = key("share", "share of the choices (one token, one expert) whose expert was in device memory")
    saved_bytes_per_step: Number = key(
        "byte", "bytes of experts that the host's cores did not have to read because of that"
    )
    fetched_bytes_per_step: Number = key(
        "byte",
        "bytes of experts that the device read over the link, while the CPU multiplied others; also counted in `transfers`",
        default=0.0,
    )
    loaded_bytes_per_step: Number | None = key(
        "byte",
        "bytes of experts copied to the device to be kept there, apart from fetched ones; also counted in `transfers`",
        only_with="records from before fetched experts stayed on the device",
        default=None,
    )


class Loop(Part):
    """One `generate` call; times are the maximum over ranks.

    Attributes:
        moved: average over this rank's steps; the record has the sum over ranks.
        experts: use of the expert cache, None without one; the record has that of the last loop.
    """

    prefill_s: float = key("s", "time to first token, including its selection", required="when measured")
    decode_s: float = key("s", "time from the first token to the last", required="when measured")
    total_s: float = key("s", "prefill plus decode", required="when measured")
    step_s: list[float] = key("s", "time of each decode step", required="when measured")
    moved: MovedPerStep = Field(default_factory=MovedPerStep.unknown, exclude=True)
    experts: ExpertUse | None = Field(None, exclude=True)


class MachineLoad(Part):
    """Load of the machine before the run loaded anything."""

    load_average_before: float = key(
        "processes", "load average of the machine in the minute before loading: processes running or waiting to run"
    )
    usable_cores: float = key("cores", "cores this process may use, by CPU affinity and cgroup")


class SlowestStep(Part):
    """One decode step; `loop` and `step` are counted from 1."""

    loop: int = key("", "loop, counted from 1")
    step: int = key("", "decode step, counted from 1")
    step_s: float = key("s", "time of the step")


class DecodeSpread(Part):
    """Spread of the decode times of a run."""

    decode_latency_min_s: float | None = key("s", "decode latency of the fastest loop; null with one loop or G = 1")
    decode_latency_max_s: float | None = key("s", "decode latency of the slowest loop; null with one loop or G = 1")
    decode_spread: float | None = key(
        "share", "(slowest - fastest) / median of the loops' decode latencies; null with one loop or G = 1"
    )
    slowest_step_over_median: float | None = key(
        "ratio",
        "time of the slowest decode step / median step of its loop, over all loops; "
        "null with fewer than 3 steps in a loop",
    )
    slowest_step_at: SlowestStep | None = key("", "which step `slowest_step_over_median` is about")


_AUTO = "--engine, --quant-bits or --batch-size auto"


class AutoChoice(Part):
    """Options that were chosen by `auto`."""

    options: list[str] = key("", "options that were given as auto", only_with=_AUTO)
    goal: str | None = key(
        "", "--goal, what the choice was made by; null: as many bits as fit, then the highest token/s", only_with=_AUTO
    )
    decode_throughput: float = key("token/s", "predicted decode throughput", only_with=_AUTO)
    over: list[str] = key(
        "", "the next best configurations that fit: command and predicted decode throughput", only_with=_AUTO
    )


_RANGE = (
    "[low, high], within which 9 of 10 runs of this kind were; null where {} is or is a lower bound, and without a GPU"
)


class Predicted(Part):
    """Predictions of the plan before anything was loaded, with the names of the measured quantities."""

    load_s: float | None = key(
        "s",
        "time to load; null if the machine, or the disk with the checkpoint, was not measured before",
    )
    load_range_s: list[float] | None = key("s", _RANGE.format("`load_s`"), default=None)
    prefill_s: float | None = key("s", "prefill latency; null if the machine was not measured before")
    prefill_range_s: list[float] | None = key("s", _RANGE.format("`prefill_s`"), default=None)
    decode_s: float | None = key("s", "decode latency; null if the machine was not measured before")
    decode_range_s: list[float] | None = key("s", _RANGE.format("`decode_s`"), default=None)
    bound_by: str | None = key("", "what takes most of a decode step")
    weight_bytes: Number = key("byte", "weights as the engine stores them")
    peak_gpu_bytes: Number | None = key("byte", "peak device memory; null without a GPU")
    peak_host_bytes: Number | None = key(
        "byte", "peak host memory of a process; null if the machine was not measured before"
    )
    host_to_device_bytes_per_step: Number = key("byte", "weights and KV cache copied to the devices in a decode step")
    device_to_host_bytes_per_step: Number = key("byte", "KV cache copied from the devices in a decode step")
    disk_read_bytes_per_step: Number = key("byte", "weights read from disk in a decode step")
    cores_bytes_per_step: Number = key(
        "byte", "weights and KV cache read by the host's cores in a decode step; of experts, the expected number"
    )


SCHEMA_VERSION = 1
STATUS_OK: Final = "ok"
STATUS_FAILED: Final = "failed"

_STREAM = "--engine stream"
_CORES = "--engine stream with --cpu-compute auto or above 0"
_EXPERTS = "--engine stream where the host's cores multiply experts and device memory keeps some of these"
_GRAPH = "--engine stream with --decode-graph auto or on"
_QUANTIZED = "--quant-bits 8 or 4, of an engine that quantizes"


class Request(Part):
    """The resolved options of a run, known before anything is loaded."""

    timestamp: str = key("", "start of the run, ISO 8601 with time zone", required="always")
    argv: list[str] = key("", "the command line, a list of strings", required="always")
    engine: str = key("", " or ".join((", ".join(ENGINES[:-1]), ENGINES[-1])), required="always")
    model: str = key("", "hub name, folder or preset as given", required="always")
    model_type: str | None = key("", "model family; null if the config could not be read", required="always")
    dtype: str = key("", "type of weights and activations, such as bfloat16", required="always")
    world_size: int = key("processes", "ranks on all nodes", required="always")
    num_nodes: int = key("machines", "nodes the ranks run on", required="always")
    batch_size: int = key("sequences", "B, summed over all ranks", required="always")
    prompt_len: int = key("token", "P, tokens of each prompt, without padding", required="always")
    gen_len: int = key("token", "G, tokens generated for each sequence", required="always")
    quant_bits: int = key("bit", "bits per stored weight: 16 (not quantized), 8 or 4", required="always")
    quant_group_size: int = key("elements", "number of weights that share a scale and a minimum", required="always")
    cpu_offload: bool = key("", "weights in host memory, as asked", required="always")
    disk_offload: bool = key("", "weights on disk, as asked; see weights_place", required="always")
    kv_offload: bool = key("", "KV cache in host memory", required="always")
    norm_kernels: str = key("", "auto, cuda or off", required="always")
    dummy: bool = key("", "random weights and random token ids", required="always")
    dummy_routing: str | None = key(
        "",
        "tokens fed to a dummy mixture of experts: text (drawn, so that experts are used as text uses them) or greedy; null otherwise",
    )
    pin_kv_cache: bool = key("", "the KV cache in host memory is page-locked")
    async_kv_offload: bool = key("", "the KV cache is copied while the layers compute")
    seed: int = key("", "seed for random weights, token ids and sampling")
    pin_memory: bool | None = key(
        "", "weights in host memory are page-locked; the value given if the run failed before it was decided"
    )
    cpu_compute: str = key("", "--cpu-compute as given: auto, off, or the share of the weights in host memory")
    cpu_threads: int | None = key("threads", "--cpu-threads as given; null if the engine chose")
    options: dict[str, Any] = key(
        "",
        "every option that differs from its default, by name: typed, from --config, or chosen for auto; works as a file for --config",
    )
    weights_place: str = key(
        "",
        "where the weights are kept: cpu (host memory), disk or gpu; cpu also without offload on a machine without a GPU, and with "
        "--disk-offload where no weight is large enough for the disk. "
        "The log's file name has the same word",
    )
    chosen: AutoChoice | None = key("", "what the plan chose for options given as auto; null if none", default=None)


class Measured(Part):
    """Measurements of the loops."""

    model_bytes: Number = key("byte", "all parameters at 2 bytes each, see utils.model_bytes", required="when measured")
    cache_bytes: Number = key(
        "byte", "KV cache at 2 bytes per element, see utils.cache_bytes", required="when measured"
    )
    hidden_bytes: Number = key(
        "byte",
        "hidden states of prompt and generated tokens at 2 bytes per element, see utils.hidden_bytes",
        required="when measured",
    )
    weight_bytes: Number = key(
        "byte", "exact size of the weights as stored, including scales", required="when measured"
    )
    load_s: float = key(
        "s",
        "time until every rank has its weights in place; compiling (compile_s) and checking the norm kernels is not included",
        required="when measured",
    )
    compile_s: float = key(
        "s",
        "time spent compiling, or waiting for another process that compiled, before the loops; 0 if all was compiled before",
    )
    cold_total_s: float | None = key(
        "s", "total latency of the first warm-up loop; null without one", required="when measured"
    )
    warmup_total_s: list[float] = key("s", "total latency of each warm-up loop")
    warmed_up: bool | None = key("", "whether the warm-up loops had converged; null without --warmup-spread")
    settling_s: list[float] = key(
        "s",
        "total latency of each generation after the warm-up in which the engine still adjusted how it runs decode steps",
    )
    loops: list[Loop] = key("", "every measured loop", required="when measured")
    evenness: DecodeSpread = inline()
    prefill_latency_s: float = key(
        "s", "time to first token, including its selection; median over loops", required="when measured"
    )
    prefill_throughput: float = key("token/s", "B P / prefill latency", required="when measured")
    decode_latency_s: float = key("s", "total - prefill; median over loops", required="when measured")
    decode_throughput: float | None = key(
        "token/s", "B (G - 1) / decode latency; null when G = 1", required="when measured"
    )
    total_latency_s: float = key("s", "one generate call; median over loops", required="when measured")
    total_throughput: float = key("token/s", "B G / total latency", required="when measured")
    peak_gpu_bytes: Number | None = key(
        "byte",
        "peak device memory during the measured loops; null without a GPU",
        required="when measured",
    )
    peak_host_bytes: Number = key("byte", "peak resident memory of the process", required="when measured")
    output_ids_sha256: str = key(
        "",
        "SHA-256 of the token ids that the last loop generated, as int64 little-endian, row by row",
        required="when measured",
    )
    transfers: MovedPerStep = key(
        "byte", "bytes moved per decode step by all ranks, counted and not assumed", required="when measured"
    )
    decode_weights_gb_per_s: float | None = key(
        "GB/s",
        "`weight_bytes` times decode steps / decode latency; null when G = 1, and for mixtures, of which a step reads some experts only",
        "decode_weights_gbps",
    )
    limit: Limit = key(
        "", "the roofline of decoding on this machine, and how much of it was reached", required="when measured"
    )
    link_use: LinkUse | TracedLinkUse | None = key(
        "", "what the first rank's link did during the decode steps; null if it was not observed"
    )
    device: str = key("", "cuda or cpu")
    experts: ExpertUse | None = key(
        "",
        "the experts kept in device memory, during the decode steps of the last loop",
        only_with=_EXPERTS,
        default=None,
    )
    predicted: Predicted | None = key(
        "",
        "what the plan predicted before loading; `zero-inference report --prediction` compares it with the measurement",
        default=None,
    )


class CpuBackendUse(Part):
    """The CPU backend's share of the work, and the rates that decided it; rates are null if the share was given."""

    threads: int = key("threads", "threads that multiply; with a GPU one per physical core")
    instructions: str = key("", "instruction set: portable, avx2, avx512 or amx")
    share: float = key("share", "planned share of host memory's weights for the cores")
    rows: int = key(
        "token",
        "most tokens of a decode step, in which the cores multiply; longer passes copy all weights, except short prompts (`prompt_rows`)",
    )
    link_alone_gb_per_s: float | None = key(
        "GB/s",
        "copies to the device while the cores are idle; with several ranks, the slowest link times their number",
        "link_alone_gbps",
    )
    link_gb_per_s: float | None = key("GB/s", "the same while the cores multiply", "link_gbps")
    cores_gb_per_s: float | None = key("GB/s", "weights multiplied by the cores while the link is busy", "cores_gbps")
    cores_alone_gb_per_s: float | None = key("GB/s", "the same while the link is idle", "cores_alone_gbps")
    read_gb_per_s: float | None = key("GB/s", "host memory read by the cores while the link is busy", "read_gbps")
    attention_gb_per_s: float | None = key(
        "GB/s",
        "KV cache that the cores read in attention, while the link is busy if weights cross it; the read rate if not measured",
        "attention_gbps",
    )
    of_step_gb_per_s: float | None = key(
        "GB/s",
        "products and attention of a decode step combined, from the two rates",
        "of_step_gbps",
    )
    attends: bool = key("", "whether the cores compute attention over the KV cache in host memory during decoding")
    crossing_s: float | None = key(
        "s",
        "time from the device to the cores and back while the link is busy, for a feed-forward block with almost no work",
    )
    device_gb_per_s: float | None = key(
        "GB/s", "copy within device memory, counting bytes read and bytes written", "device_gbps", default=None
    )
    prompt_rows: int | None = key(
        "token",
        "most tokens of a prompt in which the cores multiply, too; 0 for none",
        default=None,
    )
    prompt_share: float | None = key(
        "share", "planned share of host memory's weights for the cores in such a prompt", default=None
    )


class DecodeGraph(Part):
    """Use of CUDA graphs for decode steps, and a comparison of one step with and without; null if none was compared."""

    unused_because: str | None = key("", "why graphs are not used; null if they are")
    difference: float | None = key(
        "share",
        "largest relative difference in logits, keys and values between a step as a graph and the same step launched",
        default=None,
    )
    graph_s: float | None = key("s", "time of that step as a graph", default=None)
    launched_s: float | None = key("s", "time of that step launched kernel by kernel", default=None)
    graphs: int | None = key("graphs", "graphs of a step: several if weights are copied between them", default=None)
    tried: bool = key("", "whether recording a graph was tried", default=False)


class StreamPlacement(Part):
    """Placement of the weights by the stream engine."""

    resident_layers: int = key("layers", "layers whose weights stay on the device")
    streamed_layers: int = key("layers", "layers that are copied to the device in every step")
    ring_depth: int = key("slots", "copied layers that are on the device at the same time")
    slot_bytes: Number = key("byte", "stored size of the largest layer that is copied")
    resident_bytes: Number = key("byte", "weights that stay on the device, with slots for experts")
    workspace_bytes: Number = key("byte", "device memory that weights are dequantized into")
    fetched_bytes: Number = key("byte", "weights that are copied to the device in each decode step")
    computed_bytes: Number = key(
        "byte",
        "weights the host's cores read in each decode step; of experts, the expected number if all are equally likely",
    )
    embedding_on_host: bool | None = key(
        "",
        "the input embedding is in page-locked host memory; each pass reads the rows of its tokens over the link",
        default=None,
    )
    expert_slots: float | None = key(
        "experts",
        "experts per layer that device memory holds at once, averaged over layers",
        only_with=_EXPERTS,
        default=None,
    )
    expert_slot_bytes: Number | None = key("byte", "stored size of all those experts", only_with=_EXPERTS, default=None)
    cores: CpuBackendUse | None = key(
        "", "the host's cores; null if they do not multiply", only_with=_CORES, default=None
    )
    no_attention_because: str | None = key(
        "",
        "why the cores do not attend over the KV cache in host memory; null if they do, or if it is on the device",
        default=None,
    )
    head_bits: int | None = key("bit", "of the output head's codes; null where it is not quantized", default=None)
    decode_graph: DecodeGraph | None = key("", "decode steps as CUDA graphs", only_with=_GRAPH, default=None)


class EngineFacts(Part):
    """Facts about the loaded model, reported by its engine."""

    stream: StreamPlacement | None = key("", "where the engine put the weights", only_with=_STREAM, default=None)
    ds_config: dict[str, Any] | None = key(
        "", "the resolved DeepSpeed configuration; null for other engines", required="when measured", default=None
    )
    quantized_fraction: float | None = key(
        "share", "share of the weights that is stored quantized", only_with=_QUANTIZED, default=None
    )
    not_quantized: list[str] | None = key(
        "", "names of weights that are not quantized", only_with=_QUANTIZED, default=None
    )
    norm_kernels_unused_because: str | None = key(
        "", "why this package's norm kernels are not used; null if they are", default=None
    )


class Quality(Part):
    """The scores, if any were asked for."""

    by_task: Tasks | None = key("", "scores by task; null without --quality", "quality")


class Result(Part):
    """Results of a run, filled while it runs; None is unknown."""

    model_config = ConfigDict(frozen=False)

    norm_modules_patched: int = key("modules", "norms computed by this package's kernels", default=0)
    machine: MachineLoad | None = inline(default=None)
    measured: Measured | None = inline(default=None)
    quality: Quality | None = inline(default=None)
    engine: EngineFacts | None = inline(default=None)
    environment: Environment | None = key(
        "", "the machine and library versions", required="when measured", default=None
    )

    def add_facts(self, facts: Mapping[str, Any]) -> None:
        """Take the facts of a loaded model: fields of `EngineFacts`, and `norm_modules_patched`.

        Raises:
            ValueError: a fact that is not declared, or of another type.
        """
        self.norm_modules_patched = facts.get("norm_modules_patched", 0)
        self.engine = EngineFacts(**{name: value for name, value in facts.items() if name != "norm_modules_patched"})


class Record(Part):
    """One line of a .jsonl file: the keys that every record has come first, the others after them."""

    schema_version: Literal[1] = key("", "version of this record format", required="always", default=SCHEMA_VERSION)
    status: Literal["ok", "failed"] = key(
        "", f"'{STATUS_OK}', or '{STATUS_FAILED}', with the reason in `error`", required="always"
    )
    request: Request = inline()
    result: Result = inline()
    error: str | None = key("", "why the run failed", only_with=f"status '{STATUS_FAILED}'", default=None)

    def as_dict(self) -> dict[str, Any]:
        """Return the keys and values to write; required keys that are unknown are null."""
        return dict.fromkeys(REQUIRED) | super().as_dict()

    @model_validator(mode="after")
    def _check_whole(self, info: Any) -> Record:
        if not info.context:
            if self.status == STATUS_OK and (self.result.measured is None or self.result.environment is None):
                raise ValueError("the record of a run that succeeded lacks its measurements or its environment")
            if self.status == STATUS_FAILED and not self.error:
                raise ValueError("the record of a run that failed lacks its error")
        return self

    @model_validator(mode="before")
    @classmethod
    def _from_older(cls, data: Any, info: Any) -> Any:
        """Bring a record of an older version of this package to today's keys."""
        if not info.context or not isinstance(data, dict):
            return data
        if not isinstance(data.get("options"), dict):
            data = data | {"options": _options_of(data.get("argv"))}
        limit = data.get("limit")
        if isinstance(limit, dict) and limit.get("bound_by") is None and limit.get("fraction_of_limit") is not None:
            # only link and disk were known then
            data = data | {"limit": limit | {"bound_by": _link_or_disk(data, limit)}}
        return data


REQUIRED = tuple(required_keys(Record))


def _options_of(argv: Any) -> dict[str, str]:
    """Return the options of a command line by field name: `yes` for a flag without a value; the last one counts."""
    found: dict[str, str] = {}
    name = None
    for word in argv if isinstance(argv, list) else ():
        if isinstance(word, str) and word.startswith("--"):
            name, _, value = word[2:].partition("=")
            name = name.replace("-", "_")
            found[name] = value or "yes"
        elif isinstance(word, str) and name is not None:
            found[name] = word if found[name] == "yes" else f"{found[name]} {word}"
    return found


def _link_or_disk(data: dict[str, Any], limit: dict[str, Any]) -> str:
    """Return which of the two takes longer for a decode step."""
    moved, rates = MovedPerStep.read(data.get("transfers")), Rates.read(limit)
    link_s, disk_s = (
        (nbytes or 0) / gb_per_s if gb_per_s else 0.0
        for nbytes, gb_per_s in (
            (moved.host_to_device_bytes_per_step, rates.link_gb_per_s),
            (moved.disk_read_bytes_per_step, rates.disk_gb_per_s),
        )
    )
    return "disk" if disk_s > link_s else "link"
