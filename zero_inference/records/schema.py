"""The record of a run, one line of a .jsonl file: every key with its unit and meaning (hardware.py has the rest).

Schema 1: keys of bytes a second end in `gbps` and mean GB/s of 1e9 bytes; the attributes say `gb_per_s`.
`zero-inference report --fields` and docs/record.md print what stands here.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final, Literal

from pydantic import ConfigDict, Field, model_validator

from zero_inference.config.options import ENGINES
from zero_inference.records.field import Number, Part, inline, key, list_keys
from zero_inference.records.hardware import Environment, GpuUse, Limit, LinkUse, TracedLinkUse

SCHEMA_VERSION = 1
STATUS_OK: Final = "ok"
STATUS_FAILED: Final = "failed"

required = partial(key, required=True)
optional = partial(key, default=None)

_STREAM = "--engine stream"
_CPU = "--engine stream with --cpu-compute auto or above 0"
_EXPERTS = "--engine stream where the CPU multiplies experts and device memory keeps some of these"
_GRAPH = "--engine stream with --decode-graph auto or on"
_PASS_GRAPH = "--engine stream with --speculate and --decode-graph auto or on"
_SEVERAL = "--engine stream and several GPUs"
_QUANTIZED = "--quant-bits 8 or 4, of an engine that quantizes, or stored"
_AUTO = "--engine, --quant-bits or --batch-size auto"
_RANGE = (
    "[low, high], within which 9 of 10 runs of this kind were; null where {} is or is a lower bound, and without a GPU"
)


class MovedPerStep(Part):
    """Bytes moved per decode step, counted, and busy time of the CPU backend; null without a decode step."""

    host_to_device_bytes_per_step: Number | None = key("byte", "weights, KV cache, and results of the CPU")
    device_to_host_bytes_per_step: Number | None = key("byte", "KV cache, and inputs for the CPU")
    disk_read_bytes_per_step: Number | None = key("byte", "weights read from disk")
    cores_bytes_per_step: Number | None = optional("byte", "weights and KV cache that the CPU reads in host memory")
    cores_busy_s_per_step: float | None = optional("s", "time the CPU was computing; the rest of the step it waited")

    @classmethod
    def unknown(cls) -> MovedPerStep:
        return cls(
            host_to_device_bytes_per_step=None, device_to_host_bytes_per_step=None, disk_read_bytes_per_step=None
        )


class ExpertUse(Part):
    """Use of the expert cache in the decode steps, counted."""

    hit_rate: float = key("share", "choices (one token, one expert) whose expert was in device memory")
    saved_bytes_per_step: Number = key("byte", "experts that the CPU did not have to read because of that")
    fetched_bytes_per_step: Number = key("byte", "experts read over the link; also in `transfers`", default=0.0)
    host_hit_rate: float | None = optional(
        "share",
        "choices not in device memory whose expert was in host memory, and not only on disk",
        only_with="--engine stream where experts are on disk and host memory caches some",
    )
    loaded_bytes_per_step: Number | None = optional(
        "byte",
        "experts copied to the device to be kept there; also counted in `transfers`",
        only_with="records from before fetched experts stayed on the device",
    )


class TokenDifference(Part):
    """The first token of a sequence that differs from that of the run without speculation; both are counted from 1."""

    sequence: int = key("", "sequence of the batch, counted from 1")
    token: int = key("", "generated token, counted from 1")
    margin: float = key(
        "",
        "largest logit - the smaller one of the two tokens', after the text before; with --temperature of logit / temperature + noise",
    )
    spacing: float = key(
        "", "difference of neighboring numbers of the dtype at the largest logit; with --temperature divided by it"
    )


class BaselineUse(Part):
    """The same run without speculation, with a plan of its own; the median over its loops."""

    decode_latency_s: float = key("s", "total - prefill")
    decode_throughput: float | None = key("token/s", "B (G - 1) / decode latency; null when G = 1")
    gain: float | None = key("ratio", "decode throughput with speculation / without; null when G = 1")
    agreement: float = key("share", "tokens before the first difference of their sequence")
    differences: list[TokenDifference] = key("", "the first difference of each sequence that has one")


class SpeculationUse(Part):
    """Speculative decoding in the decode passes, counted; times are the maximum over ranks."""

    passes: int = key("passes", "passes that verified tokens")
    tokens_per_pass: float | None = key("token", "tokens of a sequence / `passes`; null when G = 1")
    acceptance: list[float | None] = key(
        "share",
        "proposals that were accepted, by their position after the last known token; null where none was proposed",
    )
    proposals_per_pass: float | None = key("token", "proposals for a sequence, mean; null when G = 1", default=None)
    turned_off: bool = key("", "--draft-len auto found a pass without proposals to be the fastest", default=False)
    draft_s: float = key("s", "time to propose tokens")
    verify_s: float = key("s", "time of the passes")
    baseline: BaselineUse | None = optional("", "the same run without speculation", only_with="--compare-baseline")


class Loop(Part):
    """One `generate` call; times are the maximum over ranks."""

    prefill_s: float = key("s", "time to first token, including its selection")
    decode_s: float = key("s", "time from the first token to the last")
    total_s: float = key("s", "prefill plus decode")
    step_s: list[float] = key("s", "time of each decode step; with --speculate of each pass, with its draft")
    # Not written as such: the record sums `moved` over ranks, and has `experts` of the last loop.
    moved: MovedPerStep = Field(default_factory=MovedPerStep.unknown, exclude=True)
    experts: ExpertUse | None = Field(None, exclude=True)
    speculation: SpeculationUse | None = Field(None, exclude=True)


class MachineLoad(Part):
    """Load of the machine before the run loaded anything."""

    load_average_before: float = key("processes", "load average of the machine in the minute before loading")
    usable_cores: float = key("cores", "cores this process may use, by CPU affinity and cgroup")


class SlowestStep(Part):
    """One decode step; `loop` and `step` are counted from 1."""

    loop: int = key("", "loop, counted from 1")
    step: int = key("", "decode step, counted from 1")
    step_s: float = key("s", "time of the step")


class DecodeSpread(Part):
    """Spread of the decode times of a run; null with one loop or G = 1."""

    decode_latency_min_s: float | None = key("s", "decode latency of the fastest loop; null with one loop or G = 1")
    decode_latency_max_s: float | None = key("s", "decode latency of the slowest loop; null with one loop or G = 1")
    decode_spread: float | None = key("share", "(slowest - fastest) / median of the loops' decode latencies")
    slowest_step_over_median: float | None = key(
        "ratio", "slowest decode step / its loop's median step, largest of all loops"
    )
    slowest_step_at: SlowestStep | None = key("", "which step `slowest_step_over_median` is about")


class AutoChoice(Part):
    """Options that were chosen by `auto`."""

    options: list[str] = key("", "options that were given as auto", only_with=_AUTO)
    goal: str | None = key("", "--goal; null: as many bits as fit, then the highest token/s", only_with=_AUTO)
    decode_throughput: float = key("token/s", "predicted decode throughput", only_with=_AUTO)
    over: list[str] = key("", "the next best that fit: command and predicted decode throughput", only_with=_AUTO)


class Predicted(Part):
    """Predictions of the plan before anything was loaded, with the names of the measured quantities."""

    load_s: float | None = key("s", "time to load; null if machine or disk of the checkpoint was not measured before")
    load_range_s: list[float] | None = optional("s", _RANGE.format("`load_s`"))
    prefill_s: float | None = key("s", "prefill latency; null if the machine was not measured before")
    prefill_range_s: list[float] | None = optional("s", _RANGE.format("`prefill_s`"))
    decode_s: float | None = key("s", "decode latency; null if the machine was not measured before")
    decode_range_s: list[float] | None = optional("s", _RANGE.format("`decode_s`"))
    bound_by: str | None = key("", "what takes most of a decode step")
    weight_bytes: Number = key("byte", "weights as the engine stores them")
    pass_s: float | None = optional("s", "a pass that verifies proposals", only_with="--speculate self")
    draft_s: float | None = optional("s", "proposals of a pass", only_with="--speculate self")
    peak_gpu_bytes: Number | None = key("byte", "peak device memory; null without a GPU")
    peak_host_bytes: Number | None = key("byte", "peak host memory of a process; null if not measured before")
    host_to_device_bytes_per_step: Number = key("byte", "weights and KV cache copied to the devices in a decode step")
    device_to_host_bytes_per_step: Number = key("byte", "KV cache copied from the devices in a decode step")
    disk_read_bytes_per_step: Number = key("byte", "weights read from disk in a decode step")
    cores_bytes_per_step: Number = key("byte", "weights and KV cache read by the CPU, of experts the expected number")


class Request(Part):
    """The resolved options of a run, known before anything is loaded."""

    timestamp: str = required("", "start of the run, ISO 8601 with time zone")
    argv: list[str] = required("", "the command line, a list of strings")
    engine: str = required("", " or ".join((", ".join(ENGINES[:-1]), ENGINES[-1])))
    model: str = required("", "hub name, folder or preset as given")
    model_type: str | None = required("", "model family; null if the config could not be read")
    dtype: str = required("", "type of weights and activations, such as bfloat16")
    world_size: int = required("processes", "ranks on all nodes")
    num_nodes: int = required("machines", "nodes the ranks run on")
    batch_size: int = required("sequences", "B, summed over all ranks")
    prompt_len: int = required("token", "P, tokens of each prompt, without padding")
    gen_len: int = required("token", "G, tokens generated for each sequence")
    quant_bits: int = required("bit", "bits per stored weight: 16 (not quantized), 8 or 4")
    quant_group_size: int = required(
        "elements", "number of weights that share a scale and a minimum; 0 for a whole row"
    )
    cpu_offload: bool = required("", "weights in host memory, as asked")
    disk_offload: bool = required("", "weights on disk, as asked; see weights_place")
    kv_offload: bool = required("", "KV cache in host memory")
    norm_kernels: str = required("", "auto, cuda or off")
    dummy: bool = required("", "random weights and random token ids")
    dummy_routing: str | None = key("", "tokens of a dummy mixture of experts: text (drawn) or greedy; null otherwise")
    pin_kv_cache: bool = key("", "the KV cache in host memory is page-locked")
    async_kv_offload: bool = key("", "the KV cache is copied while the layers compute")
    seed: int = key("", "seed for random weights, token ids and sampling")
    pin_memory: bool | None = key("", "weights in host memory are page-locked; as given if the run failed before")
    cpu_compute: str = key("", "--cpu-compute as given: auto, off, or the share of the weights in host memory")
    cpu_threads: int | None = key("threads", "--cpu-threads as given; null if the engine chose")
    options: dict[str, Any] = key("", "options that differ from their defaults, also from --config or chosen for auto")
    stored_format: str | None = key(
        "", "format of a quantized checkpoint whose weights are kept as they are stored; else null", default=None
    )
    num_gpus: int | None = key(
        "GPUs", "GPUs of all ranks; 0 without a GPU, null in a run that failed before its plan", default=None
    )
    weights_place: str = key("", "where the weights are kept: cpu (host memory), disk or gpu, as in the log's name")
    chosen: AutoChoice | None = optional("", "what the plan chose for options given as auto; null if none")


class Measured(Part):
    """Measurements of the loops."""

    model_bytes: Number = required("byte", "all parameters at 2 bytes each, see utils.model_bytes")
    cache_bytes: Number = required("byte", "KV cache at 2 bytes per element, see utils.cache_bytes")
    hidden_bytes: Number = required("byte", "hidden states at 2 bytes per element, see utils.hidden_bytes")
    weight_bytes: Number = required("byte", "exact size of the weights as stored, including scales")
    load_s: float = required("s", "time until every rank has its weights, without compiling (compile_s)")
    compile_s: float = key("s", "time spent compiling before the loops, or waiting for it; 0 if compiled before")
    cold_total_s: float | None = required("s", "total latency of the first warm-up loop; null without one")
    warmup_total_s: list[float] = key("s", "total latency of each warm-up loop")
    warmed_up: bool | None = key("", "whether the warm-up loops had converged; null without --warmup-spread")
    settling_s: list[float] = key("s", "total latency of each generation before engine and draft length had settled")
    loops: list[Loop] = required("", "every measured loop")
    spread: DecodeSpread = inline()
    prefill_latency_s: float = required("s", "time to first token, including its selection; median over loops")
    prefill_throughput: float = required("token/s", "B P / prefill latency")
    decode_latency_s: float = required("s", "total - prefill; median over loops")
    decode_throughput: float | None = required("token/s", "B (G - 1) / decode latency; null when G = 1")
    total_latency_s: float = required("s", "one generate call; median over loops")
    total_throughput: float = required("token/s", "B G / total latency")
    peak_gpu_bytes: Number | None = required(
        "byte", "peak memory in the measured loops, of the GPU with the most; null without one"
    )
    peak_host_bytes: Number = required("byte", "peak resident memory of the process")
    output_ids_sha256: str = required("", "SHA-256 of the last loop's token ids, as int64 little-endian, row by row")
    transfers: MovedPerStep = required("byte", "bytes moved per decode step by all ranks, counted and not assumed")
    decode_weights_gb_per_s: float | None = key(
        "GB/s",
        "`weight_bytes` times decode steps / decode latency; null when G = 1, and for mixtures of experts",
        "decode_weights_gbps",
    )
    limit: Limit = required("", "the roofline of decoding on this machine, and how much of it was reached")
    link_use: LinkUse | TracedLinkUse | None = key(
        "", "the first rank's links while decoding, summed; null if not observed"
    )
    gpus: list[GpuUse] | None = optional(
        "", "the GPUs of the first rank; their links in the last loop", only_with="several GPUs that one process drives"
    )
    device: str = key("", "cuda or cpu")
    experts: ExpertUse | None = optional("", "the expert cache while decoding, last loop", only_with=_EXPERTS)
    speculation: SpeculationUse | None = optional("", "speculative decoding, last loop", only_with="--speculate")
    predicted: Predicted | None = optional("", "predicted before loading; see `zero-inference report --prediction`")


class CpuBackendUse(Part):
    """The CPU backend's share of the work, and the rates that decided it; rates are null if the share was given."""

    threads: int = key("threads", "threads that multiply; with a GPU one per physical core")
    instructions: str = key("", "instruction set: portable, avx2, avx512 or amx")
    share: float = key("share", "planned share of host memory's weights for the CPU")
    rows: int = key("token", "most tokens of a decode step in which the CPU multiplies; prompts: `prompt_rows`")
    link_alone_gb_per_s: float | None = key("GB/s", "copies to the device while the CPU is idle", "link_alone_gbps")
    link_gb_per_s: float | None = key("GB/s", "the same while the CPU multiplies", "link_gbps")
    cores_gb_per_s: float | None = key("GB/s", "weights multiplied by the CPU while the link is busy", "cores_gbps")
    cores_alone_gb_per_s: float | None = key("GB/s", "the same while the link is idle", "cores_alone_gbps")
    read_gb_per_s: float | None = key("GB/s", "host memory read by the CPU while the link is busy", "read_gbps")
    attention_gb_per_s: float | None = key("GB/s", "KV cache read in attention; or the read rate", "attention_gbps")
    of_step_gb_per_s: float | None = key("GB/s", "products and attention of a decode step combined", "of_step_gbps")
    attends: bool = key("", "whether the CPU computes attention over the KV cache in host memory during decoding")
    crossing_s: float | None = key("s", "time of a hand-off while the link is busy")
    device_gb_per_s: float | None = optional("GB/s", "copy within device memory, read and written", "device_gbps")
    prompt_rows: int | None = optional("token", "most tokens of a prompt in which the CPU multiplies; 0 for none")
    prompt_share: float | None = optional("share", "planned `share` in such a prompt")


class DecodeGraph(Part):
    """Use of CUDA graphs for decode steps of one or several tokens, and a comparison of one step with and without; null if none was
    compared."""

    unused_because: str | None = key("", "why graphs are not used; null if they are")
    difference: float | None = optional("share", "largest relative difference to a launched step in logits, KV cache")
    graph_s: float | None = optional("s", "time of that step as a graph")
    launched_s: float | None = optional("s", "time of that step launched kernel by kernel")
    graphs: int | None = optional("graphs", "graphs of a step: several if weights are copied between them")
    tried: bool = key("", "whether recording a graph was tried", default=False)


class StreamPlacement(Part):
    """Placement of the weights by the stream engine."""

    resident_layers: int = key("layers", "layers whose weights stay on the device")
    streamed_layers: int = key(
        "layers", "layers with weights in host memory, which the link copies or the CPU computes"
    )
    ring_depth: int = key("slots", "slots of the ring buffer on the device, whose layers are copied there")
    slot_bytes: Number = key("byte", "stored size of the largest layer that is copied")
    resident_bytes: Number = key("byte", "weights that stay on the device, with slots for experts")
    workspace_bytes: Number = key("byte", "device memory that weights are dequantized into")
    fetched_bytes: Number = key("byte", "weights that are copied to the device in each decode step")
    computed_bytes: Number = key("byte", "weights the CPU reads in each decode step; of experts, the expected number")
    embedding_on_host: bool | None = optional("", "the input embedding is in page-locked host memory")
    expert_slots: float | None = optional("experts", "experts in device memory, mean over layers", only_with=_EXPERTS)
    expert_slot_bytes: Number | None = optional("byte", "stored size of all those experts", only_with=_EXPERTS)
    layers_by_gpu: list[int] | None = optional("layers", "decoder layers of each GPU", only_with=_SEVERAL)
    resident_bytes_by_gpu: list[Number] | None = optional("byte", "`resident_bytes` of each GPU", only_with=_SEVERAL)
    cores: CpuBackendUse | None = optional("", "the CPU backend; null if it does not multiply", only_with=_CPU)
    no_attention_because: str | None = optional("", "why the CPU does not attend over the KV cache in host memory")
    head_bits: int | None = optional("bit", "of the output head's codes; null where it is not quantized")
    decode_graph: DecodeGraph | None = optional("", "decode steps of one token as CUDA graphs", only_with=_GRAPH)
    pass_graph: DecodeGraph | None = optional("", "passes that verify proposals as CUDA graphs", only_with=_PASS_GRAPH)


class EngineFacts(Part):
    """Facts about the loaded model, reported by its engine."""

    stream: StreamPlacement | None = optional("", "where the engine put the weights", only_with=_STREAM)
    ds_config: dict[str, Any] | None = required("", "as resolved; null for other engines than deepspeed", default=None)
    quantized_fraction: float | None = optional("share", "weights that are stored quantized", only_with=_QUANTIZED)
    not_quantized: list[str] | None = optional("", "names of weights that are not quantized", only_with=_QUANTIZED)
    norm_kernels_unused_because: str | None = optional("", "why the norm kernels are not used; null if they are")


_IN_DTYPE = "with log-probabilities in the dtype of the logits (lm-eval's default); null where it is the same"
_STDERR = ("share", "standard error of the mean over the items; null for a single item")


class _Scores(Part):
    batch_size: int = key("sequences", "sequences in one forward pass of a rank")
    truncated: int = key("sequences", "sequences longer than the model's context, whose beginning was cut off")
    seconds: float = key("s", "time the task took")


class ChoiceScores(_Scores):
    """Scores of a task with choices."""

    accuracy: float = key("share", "share of items where the likeliest choice is the right one")
    stderr: float | None = key(*_STDERR)
    correct: int = key("items", "number of items where the likeliest choice is the right one")
    total: int = key("items", "number of items scored")
    outcomes: str = key("", "one digit per item, 1 (right) or 0, in the order of the data")
    accuracy_in_dtype: float | None = key("share", f"`accuracy` {_IN_DTYPE}")


class NormedChoiceScores(ChoiceScores):
    """Scores of a task whose choices differ in length."""

    acc_norm: float = key("share", "`accuracy` with log-likelihoods divided by the length of the choice")
    acc_norm_stderr: float | None = key(*_STDERR)
    outcomes_norm: str = key("", "`outcomes` with log-likelihoods divided by the length of the choice")
    acc_norm_in_dtype: float | None = key("share", f"`acc_norm` {_IN_DTYPE}")


class ProgramScores(_Scores):
    """Scores of programs that were run against their tests."""

    pass_at_k: dict[int, float] = key("share", "for each k: probability that one of k passes, mean over problems")
    stderr: dict[int, float | None] = key("share", "for each k: its standard error; null for a single problem")
    n: int = key("programs", "programs written for each problem")
    k: list[int] = key("", "the values of k in `pass_at_k`")
    problems: int = key("problems", "number of problems")
    temperature: float | None = key("", "sampling temperature; null for one greedy program")
    new_tokens: int = key("token", "maximum tokens of a program")
    passed: list[int] = key("programs", "programs that passed, for each problem")


class PerplexityScores(_Scores):
    """Perplexity of a text."""

    perplexity: float = key("", "exp of `nll_per_token`; null if it is too large for a floating-point number")
    perplexity_in_dtype: float | None = key("", f"`perplexity` {_IN_DTYPE}")
    stderr: float | None = key("", "standard error of `perplexity`; null with a single window")
    nll_per_token: float = key("nat/token", "mean negative log-likelihood per token over all documents")
    nll_stderr: float | None = key("nat/token", "standard error of `nll_per_token`; null with a single window")
    tokens: int = key("token", "number of tokens scored")
    windows: int = key("windows", "number of windows the text was split into")
    documents: int = key("documents", "number of documents")
    window: int = key("token", "length of a window")
    stride: int = key("token", "tokens scored in each window after the first")


class Tasks(Part):
    """Scores by task."""

    mmlu: ChoiceScores | None = optional("", "likeliest of four answers", only_with="--quality mmlu")
    hellaswag: NormedChoiceScores | None = optional("", "likeliest of four endings", only_with="--quality hellaswag")
    humaneval: ProgramScores | None = optional("", "programs that pass tests", only_with="--quality humaneval")
    perplexity: PerplexityScores | None = optional("", "how well a text is predicted", only_with="--quality perplexity")


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
    environment: Environment | None = required("", "the machine and library versions", default=None)

    def add_facts(self, facts: Mapping[str, Any]) -> None:
        """Take the facts of a loaded model: fields of `EngineFacts`, and `norm_modules_patched`.

        Raises:
            ValueError: a fact that is not declared, or of another type.
        """
        self.norm_modules_patched = facts.get("norm_modules_patched", 0)
        self.engine = EngineFacts(**{name: value for name, value in facts.items() if name != "norm_modules_patched"})


class Record(Part):
    """One line of a .jsonl file: the keys that every record has come first, the others after them."""

    schema_version: Literal[1] = required("", "version of this record format", default=SCHEMA_VERSION)
    status: Literal["ok", "failed"] = required("", "'ok', or 'failed', with the reason in `error`")
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
        """Older records have no `options`; take those of the command line."""
        if info.context and isinstance(data, dict) and not isinstance(data.get("options"), dict):
            return data | {"options": _options_of(data.get("argv"))}
        return data


REQUIRED = tuple(each.key for each in list_keys(Record) if each.required)


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
