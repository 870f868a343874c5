"""A machine: its memory and its measured rates, as `zero-inference link --save` finds and keeps them."""

from __future__ import annotations

import errno
import functools
import json
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from zero_inference.errors import UsageError
from zero_inference.utils.files import write_atomically
from zero_inference.utils.format import format_bytes, one_line

MOST = 1e18  # of anything here; a number above it is a mistake
LEAST_RATE = 1e-9  # a byte a second: with less a step would take inf seconds
LONGEST_NAME = 200  # characters that are shown

SCHEMA_VERSION = 1
# Raised where `link --save` measures more than before, or otherwise, so that machines are measured anew.
MEASURED_WITH = 7

# Above this share of the CPU in other programs, rates are taken to be too low.
BUSY_SHARE = 0.25

Bytes = Annotated[int, Field(ge=0, le=MOST)]
Rate = Annotated[float, Field(ge=LEAST_RATE, le=MOST, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, le=MOST, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=1 << 20)]
Source = Literal["measured", "datasheet", "assumed"]
WeightFormat = Literal["float32", "bfloat16", "float16", "int8", "int4"]


def _key(name: str) -> str:
    """Return the key of a field in the file."""
    older = {"engine_overheads": "own_work", "hand_off_s": "crossing_s"}  # names from before these fields were renamed
    return older.get(name, name.replace("gb_per_s", "gbps"))


class _ProfilePart(BaseModel):
    """Numbers must be numbers, and a key that nothing reads is a mistake. Keys of GB/s end in `gbps` in the file, as in the record."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", populate_by_name=True, alias_generator=_key)


class Gpu(_ProfilePart):
    """
    Attributes:
        memory_bytes: all of its memory.
        free_bytes: what a process can still take that uses the GPU and has put nothing there.
    """

    name: str
    memory_bytes: Bytes
    free_bytes: Bytes

    @model_validator(mode="after")
    def _check(self) -> Gpu:
        if self.free_bytes > self.memory_bytes:
            raise ValueError(f"free_bytes {self.free_bytes} is more than memory_bytes {self.memory_bytes}")
        return self


class CpuProductRate(_ProfilePart):
    """What the host's cores and the link give beside each other, for weights of one format and passes of `rows` tokens.

    Attributes:
        link_gb_per_s, cores_gb_per_s: copies to the device, and stored bytes of weights multiplied, at the same time.
        cores_alone_gb_per_s: products while the link rests.
        hand_off_s: from the device to the cores and back while the link is busy.
        call_s, expert_s: what a call of the cores takes besides its bytes and the crossing, and more for each expert that it reads; 0 in
            files from before they were measured.
    """

    format: WeightFormat
    rows: Count
    link_gb_per_s: Rate
    cores_gb_per_s: Rate
    cores_alone_gb_per_s: Rate
    hand_off_s: Seconds
    call_s: Seconds = 0.0
    expert_s: Seconds = 0.0


class CpuAttentionRate(_ProfilePart):
    """Keys and values in host memory that the cores attend over, where `heads` query heads share a key head: `gb_per_s` while the link is
    busy, `alone_gb_per_s` while it rests."""

    format: Literal["bfloat16", "float16"]
    heads: Count
    gb_per_s: Rate
    alone_gb_per_s: Rate


class CpuProfile(_ProfilePart):
    """The host's cores.

    Attributes:
        threads: that multiply.
        instructions: their instruction set.
        read_gb_per_s: host memory read by them while the link is busy.
        products: of each format those with more and more rows.
        attention: none in files from before it was measured; the cores are taken to attend as fast as they read then.
    """

    threads: Count
    instructions: str
    read_gb_per_s: Rate
    products: tuple[CpuProductRate, ...] = Field(min_length=1, strict=False)
    attention: tuple[CpuAttentionRate, ...] = Field(default=(), strict=False)

    @model_validator(mode="after")
    def _check(self) -> CpuProfile:
        numbers = Counter((each.format, each.rows) for each in self.products)
        for (name, rows), count in numbers.items():
            if count > 1:
                raise ValueError(f"products has {name} with {rows} rows {count} times")
        return self


class DeviceProductRate(_ProfilePart):
    """Stored bytes of weights of one format that the device multiplies with `rows` tokens.

    Attributes:
        call_s: what a product takes besides them; 0 without a GPU, and in files from before it was measured, whose rate is that of weights
            of 8192 x 8192.
    """

    format: WeightFormat
    rows: Count
    gb_per_s: Rate
    call_s: Seconds = 0.0


class DeviceAttentionTime(_ProfilePart):
    """A token's attention in device memory: kernels of a CUDA graph, over keys and values of 16 bits with heads of 128 columns.

    Attributes:
        heads: query heads that share a key head.
        key_heads: of all sequences.
        positions: that each of them attends to.
        seconds: of a layer.
    """

    heads: Count
    key_heads: Count
    positions: Count
    seconds: Seconds


class LaunchOverhead(_ProfilePart):
    """What running a model takes, whatever it computes.

    Attributes:
        operator_s, module_s: of the host for an operator that PyTorch launches and for a call of a module, found in small models. In files
            from before the two were told apart, all of it was of operators.
        step_s: of a step of generation besides the model: selecting a token and preparing the next step.
        graph_operator_s: of the device for an operator that moves little, of a decoder layer in a CUDA graph; None without a GPU.
        attention: of a decode step in device memory, for few and many heads and positions; none without a GPU, and in files from before it
            was measured.
        attention_gb_per_s: what these had instead: of keys and values of 16 sequences of 160 positions, besides an operator's time.
    """

    operator_s: Seconds
    module_s: Seconds = 0.0
    step_s: Seconds
    graph_operator_s: Seconds | None = None
    attention: tuple[DeviceAttentionTime, ...] = Field(default=(), strict=False)
    attention_gb_per_s: Rate | None = None


class LoadingRates(_ProfilePart):
    """Rates in bytes of the model's dtype: of random weights drawn on the device, and of weights that are quantized there; and of stored
    bytes that are put from the device into new host memory, page-locked with a GPU."""

    draw_gb_per_s: Rate
    quantize_int8_gb_per_s: Rate
    quantize_int4_gb_per_s: Rate
    keep_gb_per_s: Rate


class EngineOverhead(_ProfilePart):
    """What an engine takes besides the model's work, found with a model so thin that nothing else counts.

    Attributes:
        engine, quant_bits, kv_offload: how it was run; with keys and values in host memory the weights stay on the device, and the cores
            attend with the stream engine; with the resident one the device does, to which they are copied.
        resident: quantized weights stay on the device, too, where each block is a piece of weights.
        load_s, load_layer_s: of loading besides what is done with the weights themselves, in all and for each decoder layer.
        start_s: from the call of a generation to its first token, above what a decode step takes.
        step_piece_s, prefill_piece_s: of the host, for each piece of weights that such a pass brings: a block, a parameter or a module's
            weights, as the engine does; with keys and values in host memory for each layer.
        restored_gb_per_s: bytes of the dtype that is multiplied (a GPU's: bfloat16), restored by the engine's own operator from codes on
            the device and multiplied with one token; None where there is none.
        restored_float16_gb_per_s: the same of float16 on a GPU, which the engine may restore by another operator; None in files from
            before it was measured, and where it could not be.
    """

    engine: str
    quant_bits: Count
    kv_offload: bool = False
    resident: bool = False
    load_s: Seconds = 0.0
    load_layer_s: Seconds = 0.0
    start_s: Seconds
    step_piece_s: Seconds
    prefill_piece_s: Seconds
    restored_gb_per_s: Rate | None = None
    restored_float16_gb_per_s: Rate | None = None


class HardwareProfile(_ProfilePart):
    """One machine.

    Attributes:
        source: whether it was measured, taken from datasheets, or assumed.
        measured_with: `MEASURED_WITH` of the version that measured it.
        name: for people.
        measured_at: ISO 8601.
        others_cpu_share: share of the CPU, 0 to 1, that other programs used while it was measured; None in files from before it was noted.
        versions: of what it was measured with.
        gpus: those of one node; none for a machine without.
        host_memory_bytes: what a run can take of it.
        disk_free_bytes: of the folder of `--disk`; None where it is not known.
        link_gb_per_s: page-locked copies to one GPU while the cores rest; without a GPU copies inside host memory.
        pageable_link_gb_per_s: the same from host memory that is not page-locked.
        peers_gb_per_s: what a GPU gets from the others of its node, beside its link; `link` where that comes over the link, too; None
            where it is not known.
        device_gb_per_s: copies inside the device's memory, bytes read and bytes written both counted.
        device_products: products with weights on the device, of few tokens and, of a GPU, of many.
        matmul_tflops: products of large matrices on the device, TFLOP/s of 1e12 by dtype.
        disk_gb_per_s: direct reads; None where it is not known.
        cores: None where they are not known.
        launches: None where they are not known.
        engine_overheads: of engines where it was measured.
        loading: None where it is not known.
        process_bytes: host memory of a process that has loaded the libraries of a run, and no model; with a GPU of one that has generated
            with a thin model. None where it is not known.
        measuring_bytes: the part of it that is there only while a run measures the machine; 0 in files that do not tell it apart.
        library_bytes: what an engine's own library adds to that, by the engine's name.
    """

    schema_version: Literal[1] = 1
    source: Source
    measured_with: Count = 1
    name: str
    measured_at: str | None = None
    others_cpu_share: Annotated[float, Field(ge=0, le=1)] | None = None
    versions: dict[str, str | None] = {}
    gpus: tuple[Gpu, ...] = Field(strict=False, max_length=1024)
    host_memory_bytes: Bytes
    disk_free_bytes: Bytes | None = None
    link_gb_per_s: Rate | None = None
    pageable_link_gb_per_s: Rate | None = None
    peers_gb_per_s: Rate | Literal["link"] | None = None
    device_gb_per_s: Rate | None = None
    device_products: tuple[DeviceProductRate, ...] = Field(default=(), strict=False)
    matmul_tflops: dict[str, Rate] = {}
    disk_gb_per_s: Rate | None = None
    cores: CpuProfile | None = None
    launches: LaunchOverhead | None = None
    engine_overheads: tuple[EngineOverhead, ...] = Field(default=(), strict=False)
    loading: LoadingRates | None = None
    process_bytes: Bytes | None = None
    measuring_bytes: Bytes = 0
    library_bytes: dict[str, Bytes] = {}

    def in_words(self) -> str:
        """What it is, on one line."""
        names = Counter(one_line(gpu.name)[:LONGEST_NAME] for gpu in self.gpus)
        gpus = ", ".join(f"{count} x {name}" for name, count in names.items()) or "no GPU"
        when = f", {one_line(self.measured_at)[:10]}" if self.measured_at else ""
        host = (
            f"{format_bytes(self.host_memory_bytes)} of host memory{' (assumed)' if self.source == 'datasheet' else ''}"
        )
        return f"{one_line(self.name)[:LONGEST_NAME]} ({self.source}{when}): {gpus}, {host}"

    def busy(self) -> str | None:
        """Return how much of the CPU other programs used meanwhile, in words; None where that was little or was not noted."""
        share = self.others_cpu_share
        return None if share is None or share <= BUSY_SHARE else f"while other programs used {share:.0%} of the CPU"

    def caveat(self) -> str | None:
        """Return one line on why a measured machine's rates are less useful (other programs, an earlier version); None if they are not."""
        if self.source != "measured":
            return None
        if busy := self.busy():
            return f"rates were measured {busy} and may be too low; zero-inference link --save measures again"
        if self.measured_with < MEASURED_WITH:
            return "an earlier version measured it; zero-inference link --save FILE on that machine measures more"
        return None


def read_profile(path: Path) -> HardwareProfile:
    """The machine that a file describes.

    Raises:
        UsageError: there is no such file, or it says something that cannot be; names the first such key.
    """
    try:
        if path.exists() and not path.is_file():
            raise OSError(errno.EINVAL, "not a regular file")
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise UsageError(f"--machine {path}: {reason}; `zero-inference link --save FILE` writes one.") from error
    try:
        return HardwareProfile.model_validate_json(text)
    except ValidationError as error:
        if version := newer_version_of(path):
            raise UsageError(
                f"--machine {path}: {version}; update this package, or `zero-inference link --save FILE` writes one."
            ) from error
        raise UsageError(f"--machine {path}: {_first(error)}; `zero-inference link --save FILE` writes one.") from error


def newer_version_of(path: Path) -> str | None:
    """Say how a newer version of this package wrote the file; None of any other file."""
    try:
        return _newer_version(path, path.stat().st_mtime_ns)
    except OSError:
        return None


@functools.lru_cache(maxsize=2)
def _newer_version(path: Path, changed: int) -> str | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"))
        HardwareProfile.model_validate(found)
    except (OSError, ValueError) as error:
        if not isinstance(error, ValidationError) or not isinstance(found, dict):
            return None
    else:
        return None
    for key, known in (("schema_version", SCHEMA_VERSION), ("measured_with", MEASURED_WITH)):
        if isinstance(found.get(key), int) and found[key] > known:
            return f"a newer version wrote it ({key} {found[key]}, this one knows {known})"
    return None


def write_profile(description: HardwareProfile, path: Path) -> None:
    """Replace the file at once, so that nobody finds half of it. Raises OSError."""
    with write_atomically(path) as part:
        part.write_text(description.model_dump_json(by_alias=True, indent=1) + "\n", encoding="utf-8")


def _first(error: ValidationError) -> str:
    """The first of what is wrong: where, what was found and what it has to be."""
    found: Any = error.errors()[0]
    place = ".".join(str(part) for part in found["loc"]) or "all of it"
    if found["type"] == "json_invalid":
        return f"not JSON ({found['msg'].removeprefix('Invalid JSON: ')})"
    if found["type"] == "missing":
        return f"{place} is missing"
    if found["type"] == "extra_forbidden":
        return f"{place} is no key of a machine"
    message = found["msg"].removeprefix("Value error, ")
    shown = "" if isinstance(found["input"], (dict, list)) else f" {str(found['input'])[:60]}"
    return f"{place}{shown}: {message[:1].lower()}{message[1:]}"
