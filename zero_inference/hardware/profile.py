"""The hardware profile: memory and rates of one machine, and the JSON file of `zero-inference link --save`. None is unknown."""

from __future__ import annotations

import functools
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from zero_inference.errors import UsageError
from zero_inference.utils.environment import describe_environment, rate_versions
from zero_inference.utils.files import machine_path, write_atomically
from zero_inference.utils.format import format_bytes, one_line

MOST = 1e18  # upper limit of any number in a profile; more is a mistake
MIN_RATE = 1e-9  # a byte a second: with less a step would take inf seconds
# Raised when `link --save` measures more or measures differently, so that machines are measured again.
MEASURED_WITH = 7
BUSY_SHARE = 0.25  # of the CPU in other programs, above which rates are considered too low

Bytes = Annotated[int, Field(ge=0, le=MOST)]
Rate = Annotated[float, Field(ge=MIN_RATE, le=MOST, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, le=MOST, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=1 << 20)]
Source = Literal["measured", "datasheet", "assumed"]
WeightFormat = Literal["float32", "bfloat16", "float16", "int8", "int4"]


def _key(field: str) -> str:
    """Return the file's key for a field."""
    keys = {"engine_overheads": "own_work", "hand_off_s": "crossing_s"}
    return keys.get(field, field.replace("gb_per_s", "gbps"))


class _ProfilePart(BaseModel):
    """Refuses numbers in strings and unknown keys."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", populate_by_name=True, alias_generator=_key)


class Gpu(_ProfilePart):
    name: str
    memory_bytes: Bytes
    free_bytes: Bytes  # available to a process that has created its CUDA context

    @model_validator(mode="after")
    def _check(self) -> Gpu:
        if self.free_bytes > self.memory_bytes:
            raise ValueError(f"free_bytes {self.free_bytes} is more than memory_bytes {self.memory_bytes}")
        return self


class CpuProductRate(_ProfilePart):
    """CPU and link while both are busy, for weights in one format and `rows` tokens. GB/s of CPU products count stored bytes."""

    format: WeightFormat
    rows: Count
    link_gb_per_s: Rate
    cores_gb_per_s: Rate
    cores_alone_gb_per_s: Rate  # CPU products while the link is idle
    hand_off_s: Seconds  # from the device to the CPU and back
    call_s: Seconds = 0.0  # of a CPU call beyond its bytes and the hand-off
    expert_s: Seconds = 0.0  # beyond that, for each expert that a call reads


class CpuAttentionRate(_ProfilePart):
    """CPU attention over keys and values in host memory: `gb_per_s` while the link is busy, `alone_gb_per_s` while it is idle."""

    format: Literal["bfloat16", "float16"]
    heads: Count  # query heads per key head
    gb_per_s: Rate
    alone_gb_per_s: Rate


class CpuProfile(_ProfilePart):
    threads: Count
    instructions: str  # instruction set of the products
    read_gb_per_s: Rate  # host memory read by all threads while the link is busy
    products: tuple[CpuProductRate, ...] = Field(min_length=1, strict=False)
    attention: tuple[CpuAttentionRate, ...] = Field(default=(), strict=False)

    @model_validator(mode="after")
    def _check(self) -> CpuProfile:
        (name, rows), count = Counter((each.format, each.rows) for each in self.products).most_common(1)[0]
        if count > 1:
            raise ValueError(f"products has {name} with {rows} rows {count} times")
        return self


class DeviceProductRate(_ProfilePart):
    """Stored bytes of weights of one format that the device multiplies with `rows` tokens, and the seconds of a product beyond them."""

    format: WeightFormat
    rows: Count
    gb_per_s: Rate
    call_s: Seconds = 0.0


class DeviceAttentionTime(_ProfilePart):
    """Decode attention of one layer in device memory, replayed in a CUDA graph, over 16-bit keys and values with head_dim 128."""

    heads: Count  # query heads per key head
    key_heads: Count  # of all sequences
    positions: Count  # of each sequence
    seconds: Seconds


class LaunchOverhead(_ProfilePart):
    """Overhead of running any model, measured with small models."""

    operator_s: Seconds  # host time of a PyTorch operator
    module_s: Seconds = 0.0  # host time of a module call; in `operator_s` in older files
    step_s: Seconds  # host time of a decode step besides the model: sampling and preparing the next step
    graph_operator_s: Seconds | None = None  # device time of a small operator of a decoder layer in a CUDA graph
    attention: tuple[DeviceAttentionTime, ...] = Field(default=(), strict=False)
    attention_gb_per_s: Rate | None = (
        None  # instead, in older files: 16 sequences of 160 positions, beyond an operator's time
    )


class LoadingRates(_ProfilePart):
    """Bytes of the model's dtype drawn at random or quantized on the device; `keep`: stored bytes copied into new host memory
    (page-locked with a GPU)."""

    draw_gb_per_s: Rate
    quantize_int8_gb_per_s: Rate
    quantize_int4_gb_per_s: Rate
    keep_gb_per_s: Rate


class EngineOverhead(_ProfilePart):
    """Time of an engine besides the model's work, measured with a model so thin that nothing else counts.

    A piece is what the engine fetches as a whole: a block, a parameter or a module's weights; with `kv_offload` a layer's keys and values.
    With `kv_offload` the weights stay on the device; the stream engine computes CPU attention, the resident engine copies keys and values.
    With `resident` quantized weights stay on the device, and a piece is a block.
    """

    engine: str
    quant_bits: Count
    kv_offload: bool = False
    resident: bool = False
    load_s: Seconds = 0.0  # of loading besides the weights themselves
    load_layer_s: Seconds = 0.0  # the same for each decoder layer
    start_s: Seconds  # from the call of generate to the first token, beyond a decode step
    step_piece_s: Seconds  # host time in a decode step for each piece
    prefill_piece_s: Seconds
    # Bytes of the computed dtype (on a GPU bfloat16) that the engine's own operator dequantizes and multiplies with one token.
    restored_gb_per_s: Rate | None = None
    restored_float16_gb_per_s: Rate | None = None


class HardwareProfile(_ProfilePart):
    """One machine, of one node."""

    schema_version: Literal[1] = 1
    source: Source
    measured_with: Count = 1  # `MEASURED_WITH` of the version that measured it
    name: str
    measured_at: str | None = None  # ISO 8601
    others_cpu_share: Annotated[float, Field(ge=0, le=1)] | None = (
        None  # CPU use of other programs during the measurement
    )
    versions: dict[str, str | None] = {}  # of the packages and drivers that rates depend on
    gpus: tuple[Gpu, ...] = Field(strict=False, max_length=1024)
    host_memory_bytes: Bytes  # available to a run
    disk_free_bytes: Bytes | None = None  # of the folder of `--disk`
    link_gb_per_s: Rate | None = (
        None  # page-locked copies to one GPU, CPU idle; without a GPU copies inside host memory
    )
    pageable_link_gb_per_s: Rate | None = None
    peers_gb_per_s: Rate | Literal["link"] | None = (
        None  # from a node's other GPUs beside the link; "link" if over the link
    )
    device_gb_per_s: Rate | None = None  # copies inside device memory, read plus written bytes
    device_products: tuple[DeviceProductRate, ...] = Field(default=(), strict=False)
    matmul_tflops: dict[str, Rate] = {}  # of large matrices on the device, TFLOP/s (1e12) by dtype
    disk_gb_per_s: Rate | None = None  # direct reads
    cores: CpuProfile | None = None
    launches: LaunchOverhead | None = None
    engine_overheads: tuple[EngineOverhead, ...] = Field(default=(), strict=False)
    loading: LoadingRates | None = None
    process_bytes: Bytes | None = (
        None  # of a process with the libraries of a run and no model; with a GPU after generating
    )
    measuring_bytes: Bytes = 0  # the part of `process_bytes` that is only there while a run measures the machine
    library_bytes: dict[str, Bytes] = {}  # what an engine's own library adds, by engine

    def in_words(self) -> str:
        """Return name, source, GPUs and host memory on one line."""
        names = Counter(one_line(gpu.name) for gpu in self.gpus)
        gpus = ", ".join(f"{count} x {name}" for name, count in names.items()) or "no GPU"
        when = f", {one_line(self.measured_at)[:10]}" if self.measured_at else ""
        assumed = " (assumed)" if self.source == "datasheet" else ""
        host = f"{format_bytes(self.host_memory_bytes)} of host memory{assumed}"
        return f"{one_line(self.name)} ({self.source}{when}): {gpus}, {host}"

    def caveat(self) -> str | None:
        """Return one line on why measured rates are less useful (a busy CPU, an older version); None if they are not."""
        share = self.others_cpu_share or 0.0
        if self.source != "measured":
            return None
        if share > BUSY_SHARE:
            return (
                f"rates were measured while other programs used {share:.0%} of the CPU and may be too low; "
                "zero-inference link --save measures again"
            )
        if self.measured_with < MEASURED_WITH:
            return "the hardware profile is from an older version; zero-inference link --save FILE on that machine measures more"
        return None


def write_profile(profile: HardwareProfile, path: Path) -> None:
    """Replace the file atomically. Raises OSError."""
    with write_atomically(path) as part:
        part.write_text(profile.model_dump_json(by_alias=True, indent=1) + "\n", encoding="utf-8")


def read_profile(path: Path) -> HardwareProfile:
    """Read a file of `zero-inference link --save`.

    Raises:
        UsageError: there is no such file, or a value is invalid; names the first such key.
    """
    try:
        return HardwareProfile.model_validate_json(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        why = error.strerror
    except UnicodeDecodeError:
        why = "not a text file"
    except ValidationError as error:
        why = describe_first(error)
    raise UsageError(f"--machine {path}: {why}; `zero-inference link --save FILE` writes one.")


def describe_first(error: ValidationError) -> str:
    """Return key, value and constraint of the first error."""
    found: Any = error.errors()[0]
    place = ".".join(map(str, found["loc"])) or "all of it"
    if found["type"] == "json_invalid":
        return f"not JSON ({found['msg'].removeprefix('Invalid JSON: ')})"
    if found["type"] == "extra_forbidden":
        return f"{place} is no key of this version"
    message = found["msg"].removeprefix("Value error, ")
    shown = "" if isinstance(found["input"], (dict, list)) else f" {str(found['input'])[:60]}"
    return f"{place}{shown}: {message[:1].lower()}{message[1:]}"


def cached_profile() -> HardwareProfile | None:
    """Return the profile of this machine that `measure_and_cache` wrote; None without one, or if it is unreadable or outdated."""
    path = machine_path()
    try:
        return _read_current(path, path.stat().st_mtime_ns)
    except OSError:
        return None


@functools.lru_cache(maxsize=1)  # plans ask for every candidate
def _read_current(path: Path, modified_ns: int) -> HardwareProfile | None:
    try:
        found = read_profile(path)
    except UsageError:
        return None
    return None if why_outdated(found) else found


def why_outdated(profile: HardwareProfile) -> str | None:
    """Return what has changed since the profile was measured; None if it is current."""
    if profile.measured_with < MEASURED_WITH:
        return "the profile is from an older version"
    now = describe_environment()
    for name, version in rate_versions(now).items():
        if profile.versions.get(name) != version:
            return f"{name.replace('_', ' ')} was {profile.versions.get(name)} and is {version}"
    if [gpu.name for gpu in profile.gpus] != [gpu["name"] for gpu in now["gpus"]]:
        return "its GPUs have changed"
    return None
