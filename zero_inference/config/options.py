"""Every choice of one run, with its default and what it may be.

Importing this package imports neither torch nor transformers, so that `--help` and bad usage answer at once.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

AUTO = "auto"
GOALS = ("throughput", "latency", "memory")
ENGINES = ("deepspeed", "stream", "accelerate", "resident")
QUANTIZING_ENGINES = PAGE_LOCKING_ENGINES = SHARDING_ENGINES = ("deepspeed", "stream")
STREAM_OPTIONS = ("gpu_memory", "ring_depth", "cpu_compute", "cpu_threads", "decode_graph")  # which no other engine has
LOG_PREFIX = {"deepspeed": "ds"}  # of a log's name, where it is not the engine's
DTYPES = ("auto", "float16", "bfloat16", "float32")
NORM_KERNELS = ("auto", "cuda", "off")
DECODE_GRAPH = ("auto", "on", "off")
DUMMY_ROUTING = ("text", "greedy")
QUANT_BITS = (16, 8, 4)
LONGEST_PROMPT = 0  # prompt_len: that of the longest --prompt, in tokens
CPU_COMPUTE = {"auto": None, "off": 0.0}  # words for a share
QUALITY_TASKS = ("mmlu", "hellaswag", "humaneval", "perplexity")
# Options that mean nothing without another one, by that one; `--quality TASK` stands for the task among those of --quality.
QUALITY_COMPANIONS = {
    "--quality": ("quality_data", "quality_limit", "quality_batch_size", "quality_items"),
    "--quality humaneval": (
        "allow_code_execution",
        "humaneval_samples",
        "humaneval_temperature",
        "humaneval_tokens",
        "pass_at_k",
    ),
    "--quality perplexity": ("perplexity_window", "perplexity_stride"),
}
GROUP_SIZES = {16: 64, 8: 64, 4: 32}  # default by bits
MIN_RING_DEPTH = 2  # a layer computes while the next one comes
MOST = 2**31 - 1  # of whatever is counted
LONGEST_WINDOW = 1024  # tokens, of perplexity where none is asked for
MOST_GIB = 2**30
# What a whole number may be; what the machine can hold of it is for the plan to say.
WHOLE_NUMBERS = {
    **dict.fromkeys(
        (
            "loops",
            "batch_size",
            "prompt_len",
            "gen_len",
            "quality_limit",
            "quality_batch_size",
            "humaneval_samples",
            "humaneval_tokens",
            "perplexity_window",
            "perplexity_stride",
        ),
        (1, MOST),
    ),
    "warmup": (0, MOST),
    "cpu_threads": (1, MOST),
    "quant_group_size": (2, MOST),
    "seed": (0, 2**63 - 1),
}
PATHS = (
    "model",
    "prompts",
    "save_config",
    "offload_dir",
    "trace",
    "ds_config",
    "quality_data",
    "quality_items",
    "log_file",
    "log_dir",
    "machine",
)
QUALITY_FIELDS = ("quality", *(name for names in QUALITY_COMPANIONS.values() for name in names))


@dataclass(frozen=True)
class Options:
    """What one run was asked to do, checked by nobody yet: `RunConfig` is. Lengths in tokens, sizes in GiB where the name says so."""

    model: str = "facebook/opt-1.3b"
    dummy: bool = False
    dummy_routing: str = "text"
    engine: str = "deepspeed"
    loops: int = 3
    warmup: int = 1
    warmup_spread: float | None = None
    batch_size: int = 1
    prompt_len: int = 512
    gen_len: int = 32
    prompts: str | None = None
    prompt: tuple[str, ...] = ()  # texts; with prompt_len=OWN_LENGTH nothing is put before the longest of them
    chat: bool = False
    dtype: str = "auto"
    cpu_offload: bool = False
    disk_offload: bool = False
    offload_dir: str = "~/offload_dir"
    use_gds: bool = False
    kv_offload: bool = False
    pin_kv_cache: bool = False
    async_kv_offload: bool = False
    quant_bits: int = 16
    quant_group_size: int | None = None  # None: see `group_size`
    pin_memory: bool | None = None
    norm_kernels: str = "auto"
    gpu_memory: float | None = None
    cpu_compute: str = "auto"
    cpu_threads: int | None = None
    ring_depth: int | None = None
    decode_graph: str = "auto"
    trace: str | None = None
    ds_config: str | None = None
    quality: tuple[str, ...] = ()
    quality_data: str | None = None
    quality_limit: int | None = None
    quality_batch_size: int | None = None
    quality_items: str | None = None
    allow_code_execution: bool = False
    humaneval_samples: int = 1
    humaneval_temperature: float = 0.8
    humaneval_tokens: int = 512
    pass_at_k: tuple[int, ...] = ()
    perplexity_window: int | None = None
    perplexity_stride: int | None = None
    log_file: str | None = None
    log_dir: str = "logs"
    seed: int = 0
    verbose: int = 1
    trust_remote_code: bool = False
    dry_run: bool = False
    save_config: str | None = None
    json: bool = False
    machine: str | None = None
    assume: str | None = None
    auto: tuple[str, ...] = ()  # fields that the plan is to find; what they say until then is not meant
    goal: str | None = None

    @property
    def positions(self) -> int:
        """Of a sequence: prompt and generated tokens."""
        return self.prompt_len + self.gen_len

    @property
    def offload_path(self) -> Path:
        return Path(os.path.expanduser(self.offload_dir)).absolute()

    @property
    def quantized(self) -> bool:
        return self.quant_bits != 16

    @property
    def group_size(self) -> int:
        """Quantized weights that share a scale."""
        return GROUP_SIZES[self.quant_bits] if self.quant_group_size is None else self.quant_group_size

    @property
    def cpu_share(self) -> float | None:
        """Of the weights in host memory, what the host's cores multiply; None where the plan is to find it."""
        if self.cpu_compute in CPU_COMPUTE:
            return CPU_COMPUTE[self.cpu_compute]
        return float(self.cpu_compute)

    @property
    def offload(self) -> str:
        """Where the weights wait: 'cpu', 'disk' or 'gpu' (the device). `validate` turns cpu_offload on for the stream engine."""
        return "cpu" if self.cpu_offload else "disk" if self.disk_offload else "gpu"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(Options)}
FIELD_NAMES = tuple(DEFAULTS)
