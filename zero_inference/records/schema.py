"""The record of a run: every key that is written into it, its unit and its meaning, said here once (those of the loops, the limit,
`quality`, `environment` and the plan's in loops.py, limit.py, scores.py, machine.py and planned.py).

Schema 1: keys of bytes a second end in `gbps` there and mean GB/s of 1e9 bytes; the attributes say `gb_per_s`.
`zero-inference report --fields` prints what stands here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, get_type_hints

from zero_inference.config.choices import ENGINES
from zero_inference.records.key import dataclasses_in, inline, key
from zero_inference.records.limit import Limit, LinkUse, TracedLinkUse
from zero_inference.records.loops import Evenness, ExpertUse, Loop, MachineLoad, MovedPerStep
from zero_inference.records.machine import Environment
from zero_inference.records.planned import Chosen, Predicted
from zero_inference.records.scores import Tasks, TaskScores

SCHEMA_VERSION = 1
STATUS_OK = "ok"
STATUS_FAILED = "failed"

_STREAM = "--engine stream"
_CORES = "--engine stream with --cpu-compute auto or above 0"
_EXPERTS = "--engine stream where the host's cores multiply experts and device memory keeps some of these"
_GRAPH = "--engine stream with --decode-graph auto or on"
_QUANTIZED = "--quant-bits 8 or 4, of an engine that quantizes"


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked for, as it was resolved: known before anything is loaded."""

    timestamp: str = key("", "start of the run, ISO 8601 with time zone", required="always")
    argv: list[str] = key("", "the command line, a list of strings", required="always")
    engine: str = key("", " or ".join((", ".join(ENGINES[:-1]), ENGINES[-1])), required="always")
    model: str = key("", "hub name, folder or preset as given", required="always")
    model_type: str | None = key(
        "", "transformers' name of the family; null if the config could not be read", required="always"
    )
    dtype: str = key("", "type of weights and activations, such as bfloat16", required="always")
    world_size: int = key("processes", "ranks of all nodes together", required="always")
    num_nodes: int = key("machines", "nodes that the ranks run on", required="always")
    batch_size: int = key("sequences", "B, over all ranks", required="always")
    prompt_len: int = key("token", "P, real tokens of each prompt", required="always")
    gen_len: int = key("token", "G, tokens generated per sequence", required="always")
    quant_bits: int = key("bit", "bits of a stored weight: 16 (not quantized), 8 or 4", required="always")
    quant_group_size: int = key("elements", "weights that share a scale and a minimum", required="always")
    cpu_offload: bool = key("", "weights in host memory", required="always")
    disk_offload: bool = key("", "weights on disk", required="always")
    kv_offload: bool = key("", "KV cache in host memory", required="always")
    norm_kernels: str = key("", "auto, cuda or off", required="always")
    dummy: bool = key("", "random weights and random token ids", required="always")
    pin_kv_cache: bool = key("", "the KV cache in host memory is page-locked")
    async_kv_offload: bool = key("", "the KV cache is copied while the layers compute")
    seed: int = key("", "seed of random weights, token ids and samples")
    pin_memory: bool | None = key(
        "", "weights in host memory are page-locked; as asked where the run failed before it was decided"
    )
    cpu_compute: str = key("", "as asked: auto, off, or the share of the weights in host memory for the host's cores")
    cpu_threads: int | None = key("threads", "as asked; null where the engine chose")
    options: dict[str, Any] = key(
        "",
        "every option that differs from its default, by name: what was typed, what a file of --config said, and what the plan found of "
        "what was auto. As lines of YAML they are a file for --config",
    )
    weights_place: str = key(
        "",
        "where the weights waited: cpu (host memory), disk or gpu; cpu also for a run without offload on a machine without a GPU. "
        "The place in the log's name",
    )
    chosen: Chosen | None = key("", "what the plan found of what was auto; null where nothing was", default=None)


@dataclass(frozen=True, slots=True)
class Measured:
    """What the loops gave."""

    model_bytes: int = key("byte", "all parameters at 2 bytes, see utils.model_bytes", required="when measured")
    cache_bytes: int = key("byte", "KV cache at 2 bytes, see utils.cache_bytes", required="when measured")
    hidden_bytes: int = key(
        "byte",
        "hidden states of prompt and generated tokens at 2 bytes, see utils.hidden_bytes",
        required="when measured",
    )
    weight_bytes: int = key(
        "byte", "weights as the engine stores them, scales included, exact", required="when measured"
    )
    load_s: float = key(
        "s",
        "until every rank has its weights where they stay; compiling and trying kernels for norms comes before and is not counted",
        required="when measured",
    )
    cold_total_s: float | None = key(
        "s", "total latency of the first warm-up loop; null without one", required="when measured"
    )
    warmup_total_s: list[float] = key("s", "total latency of each warm-up loop")
    warmed_up: bool | None = key("", "whether the loops had become alike; null without --warmup-spread")
    settling_s: list[float] = key(
        "s",
        "total latency of each generation after the warm-up, until the engine had settled how its decode steps run",
    )
    loops: list[Loop] = key("", "every measured loop", required="when measured")
    evenness: Evenness = inline()
    prefill_latency_s: float = key(
        "s", "time to first token, its selection included; median over loops", required="when measured"
    )
    prefill_throughput: float = key("token/s", "B P / prefill latency", required="when measured")
    decode_latency_s: float = key("s", "total - prefill; median over loops", required="when measured")
    decode_throughput: float | None = key(
        "token/s", "B (G - 1) / decode latency; null when G = 1", required="when measured"
    )
    total_latency_s: float = key("s", "one generate call; median over loops", required="when measured")
    total_throughput: float = key("token/s", "B G / total latency", required="when measured")
    peak_gpu_bytes: int | None = key(
        "byte",
        "most device memory held during the measured loops; null without a device",
        required="when measured",
    )
    peak_host_bytes: int = key("byte", "most resident host memory of the process", required="when measured")
    output_ids_sha256: str = key(
        "", "of the generated ids of the last loop, see fingerprint.output_ids_sha256", required="when measured"
    )
    transfers: MovedPerStep = key("byte", "bytes moved per decode step, all ranks, counted", required="when measured")
    decode_weights_gb_per_s: float | None = key(
        "GB/s",
        "`weight_bytes` for each decode step / decode latency; null when G = 1, and for a mixture, of which a step reads some experts only",
        "decode_weights_gbps",
    )
    limit: Limit = key(
        "", "the roofline of the decode on this machine, and the share reached", required="when measured"
    )
    link_use: LinkUse | TracedLinkUse | None = key(
        "", "what the first rank's link did in the decode steps; null where nothing observes it"
    )
    device: str = key("", "cuda or cpu")
    experts: ExpertUse | None = key(
        "",
        "the experts that device memory keeps, in the decode steps of the last loop",
        only_with=_EXPERTS,
        default=None,
    )
    predicted: Predicted | None = key(
        "", "what the plan said before loading; `zero-inference report --prediction` compares", default=None
    )


@dataclass(frozen=True, slots=True)
class CoresUse:
    """How the host's cores take part, and the rates by which that was decided; those are null where the share was given."""

    threads: int = key("threads", "that multiply, each on a physical core of its own where there is a GPU")
    instructions: str = key("", "the instruction set of the products: portable, avx2, avx512 or amx")
    share: float = key("share", "of the bytes in host memory, that the cores were to multiply")
    rows: int = key("token", "most tokens of a rank's pass in which they do; longer passes fetch everything")
    link_alone_gb_per_s: float | None = key(
        "GB/s",
        "copies to the device while the cores rest; of several ranks, as many times the slowest link",
        "link_alone_gbps",
    )
    link_gb_per_s: float | None = key("GB/s", "the same while the cores multiply", "link_gbps")
    cores_gb_per_s: float | None = key(
        "GB/s", "stored bytes of weights multiplied while the link is busy", "cores_gbps"
    )
    cores_alone_gb_per_s: float | None = key("GB/s", "the same while the link rests", "cores_alone_gbps")
    read_gb_per_s: float | None = key("GB/s", "host memory read by the cores while the link is busy", "read_gbps")
    attention_gb_per_s: float | None = key(
        "GB/s",
        "keys and values that the cores attend over, beside a busy link unless no weights cross it; reading's rate where that is not known",
        "attention_gbps",
    )
    of_step_gb_per_s: float | None = key(
        "GB/s",
        "of a decode step's products and attention over keys and values together, as the two rates say",
        "of_step_gbps",
    )
    attends: bool = key("", "whether the cores compute decode attention over keys and values in host memory")
    crossing_s: float | None = key(
        "s", "from the device to the cores and back beside a busy link, for a feed-forward of hardly any width"
    )
    device_gb_per_s: float | None = key(
        "GB/s", "copy inside the device's memory, bytes read and bytes written", "device_gbps", default=None
    )


@dataclass(frozen=True, slots=True)
class DecodeGraph:
    """Whether decode steps are CUDA graphs, and how one step compared that was computed in both ways; null where none was."""

    unused_because: str | None = key("", "why it is not used; null if it is")
    difference: float | None = key(
        "share",
        "largest relative difference of that step's logits, keys and values",
        default=None,
    )
    graph_s: float | None = key("s", "of that step as a graph", default=None)
    launched_s: float | None = key("s", "of that step launched kernel by kernel", default=None)
    graphs: int | None = key("graphs", "one, and more where weights are fetched between them", default=None)
    tried: bool = key("", "whether one was recorded, or could not be; false where it was clear before", default=False)


@dataclass(frozen=True, slots=True)
class StreamPlacement:
    """What the stream engine placed where."""

    resident_layers: int = key("layers", "layers whose weights stay on the device")
    streamed_layers: int = key("layers", "layers that are copied to the device for every step")
    ring_depth: int = key("slots", "of the ring: copied layers that are on the device at once")
    slot_bytes: int = key("byte", "largest layer that is copied, as it is stored")
    resident_bytes: int = key("byte", "weights that stay on the device, and places for single experts there")
    workspace_bytes: int = key("byte", "device memory to dequantize into")
    fetched_bytes: int = key("byte", "weights that are copied to the device for each decode step")
    computed_bytes: int = key(
        "byte",
        "weights that the host's cores read in each decode step; of experts those that it is expected to choose, if all are chosen alike",
    )
    expert_slots: float | None = key(
        "experts", "of each layer, that device memory keeps at once; the mean", only_with=_EXPERTS, default=None
    )
    expert_slot_bytes: int | None = key("byte", "of all of these, as they are stored", only_with=_EXPERTS, default=None)
    cores: CoresUse | None = key(
        "", "the host's cores; null where they do not multiply", only_with=_CORES, default=None
    )
    decode_graph: DecodeGraph | None = key("", "a decode step as CUDA graphs", only_with=_GRAPH, default=None)


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an engine says of the model that it loaded."""

    stream: StreamPlacement | None = key("", "what the engine placed where", only_with=_STREAM, default=None)
    ds_config: dict[str, Any] | None = key(
        "", "DeepSpeed's config as resolved; null for other engines", required="when measured", default=None
    )
    quantized_fraction: float | None = key(
        "share", "of the weights, that is stored quantized", only_with=_QUANTIZED, default=None
    )
    not_quantized: list[str] | None = key(
        "", "names of the weights that are stored as they were", only_with=_QUANTIZED, default=None
    )
    norm_kernels_unused_because: str | None = key(
        "", "why our norm kernels are not used; null if they are", default=None
    )


@dataclass(frozen=True, slots=True)
class Quality:
    """The scores, if any were asked for."""

    by_task: dict[str, TaskScores] | None = key("", "scores by task; null without --quality", "quality", parts=Tasks)


@dataclass(slots=True)
class Result:
    """What became of a request, filled on the way: None is what the run did not get to know."""

    norm_modules_patched: int = key("modules", "norms that our kernels compute", default=0)
    machine: MachineLoad | None = inline(default=None)
    measured: Measured | None = inline(default=None)
    quality: Quality | None = inline(default=None)
    engine: EngineFacts | None = inline(default=None)
    environment: Mapping[str, Any] | None = key(
        "", "machine and versions", required="when measured", parts=Environment, default=None
    )

    def add_facts(self, facts: Mapping[str, Any]) -> None:
        """Take what a loaded model says of itself.

        Raises:
            ValueError: a fact that is not declared here.
        """
        declared = {each.name for each in fields(EngineFacts)}
        if odd := sorted(facts.keys() - declared - {"norm_modules_patched"}):
            raise ValueError(f"the engine says {', '.join(odd)}, which records.schema does not declare")
        known = {name: facts[name] for name in declared & facts.keys()}
        hints = get_type_hints(EngineFacts)
        for name, value in known.items():
            kinds = dataclasses_in(hints[name])
            if kinds and isinstance(value, Mapping):
                known[name] = kinds[0](**value)
        self.engine = EngineFacts(**known)
        self.norm_modules_patched = facts.get("norm_modules_patched", 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One line of a .jsonl file: the keys that every record has come first, the others after them."""

    schema_version: int = key("", "layout of the record", required="always", default=SCHEMA_VERSION)
    status: str = key("", f"'{STATUS_OK}', or '{STATUS_FAILED}' with the reason in `error`", required="always")
    request: Request = inline()
    result: Result = inline()
    error: str | None = key("", "why it failed", only_with=f"status '{STATUS_FAILED}'", default=None)
