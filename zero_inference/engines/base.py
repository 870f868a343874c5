"""What an engine is: four functions, what they are told and what they hand over.

An engine is a module with

    connect(ranks) -> Any                        a communicator of its own, made before free memory is read; None if it needs none
    plan(job) -> EnginePlan                      what will lie where; loads nothing; raises UsageError. Other ranks are asked only where
                                                 `job.group` says that all of them plan it
    check(plan)                                  whether the machine has what the plan needs besides memory; raises UsageError
    load(plan, progress) -> LoadedModel          raises RunError when loading goes wrong
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from zero_inference.config.options import PAGE_LOCKING_ENGINES
from zero_inference.config.run_config import RunConfig
from zero_inference.engines.cost_terms import CostTerms
from zero_inference.errors import UsageError
from zero_inference.hardware.machine import LocalMachine, Machine
from zero_inference.kv_cache.attention_patch import window_only_in_cache
from zero_inference.kv_cache.cpu_attention import CpuAttention
from zero_inference.kv_cache.device import sees_all_positions
from zero_inference.kv_cache.host import SLOTS
from zero_inference.models.empty_model import EmptyModel
from zero_inference.models.layers import COMPARED_BYTES, first_layer_bytes
from zero_inference.models.sizes import ModelSizes, logits_bytes
from zero_inference.models.spec import ModelSpec
from zero_inference.records.hardware import LinkUse
from zero_inference.records.schema import CpuBackendUse, MovedPerStep
from zero_inference.utils.format import format_bytes
from zero_inference.utils.ranks import Ranks
from zero_inference.utils.transfers import Transfers

Progress = Callable[[int], None]
WINDOW_OF_CACHE = "whether the window is the cache's"  # of a model, known once
MATMUL_WORKSPACE_BYTES = 32 << 20  # that PyTorch gives cuBLAS on Hopper; less on others


@dataclass(frozen=True)
class Job:
    """One run as an engine sees it: what was asked, of which model, on which device; and the sizes that follow from it alone.

    Attributes:
        free_device_bytes: of each rank's device, the least of all ranks where they are connected; None for a CPU, where the
            device is host memory.
        group: what the engine's `connect` gave; None where this rank plans alone.
        machine: the hardware that it is for.
    """

    config: RunConfig
    spec: ModelSpec
    ranks: Ranks
    empty_model: EmptyModel
    free_device_bytes: int | None
    group: Any = None
    machine: Machine = LocalMachine()

    @property
    def sizes(self) -> ModelSizes:
        return self.empty_model.sizes

    @property
    def on_gpu(self) -> bool:
        return self.ranks.device.type == "cuda"

    @property
    def rank_batch(self) -> int:
        """Sequences of a rank."""
        return self.config.batch_size // self.ranks.world_size

    @property
    def length(self) -> int:
        """Positions of a sequence, prompt and generated tokens."""
        return self.config.positions

    @property
    def pin_weights(self) -> bool:
        """Whether weights in host memory are to be page-locked: as asked, and by default where a GPU copies them."""
        if self.config.offload == "gpu" or self.config.engine not in PAGE_LOCKING_ENGINES:
            return False
        return self.on_gpu if self.config.pin_memory is None else self.config.pin_memory

    def kv_bytes(self, length: int | None = None) -> int:
        """Keys and values of a rank's sequences in all layers, in the model's dtype, at `length` positions (default: all).

        Sliding windows are not taken off: the caches of this package keep all positions.
        """
        return self._kv_bytes(sum(self.sizes.kv_widths), length)

    @property
    def mean_kv_bytes(self) -> int:
        """What of them a decode step reads, the mean of the steps: they follow a prompt and the tokens 1 to G - 1."""
        return self.kv_bytes(2 * self.config.prompt_len + self.config.gen_len) // 2

    @property
    def growing_kv_bytes(self) -> int:
        """The keys, or the values, of a layer: what is there twice while they grow."""
        return self._kv_bytes(max(self.sizes.kv_widths, default=0)) // 2

    def state_bytes(self, length: int | None = None) -> int:
        """Return the bytes of a rank's other state at `length` positions, by default all: of recurrences, and keys of indexers.

        It is always on the device.
        """
        at_any_length, of_position = self.sizes.state_bytes
        return self.rank_batch * (at_any_length + (self.length if length is None else length) * of_position)

    @property
    def window_only_in_cache(self) -> bool:
        """Return whether keys and values have to be in transformers' own cache: it drops those beyond a window, and masks know none."""
        if sees_all_positions(self.spec.config, self.length):
            return False
        if not self.empty_model.is_empty:
            return self.empty_model.cache.get(WINDOW_OF_CACHE, False)
        return self.empty_model.cached(WINDOW_OF_CACHE, lambda: window_only_in_cache(self.empty_model.model))

    @property
    def kv_device_bytes(self) -> int:
        """What of them is on the device: all, or the slots that layers in host memory pass through on their way to a GPU."""
        if not self.config.kv_offload:
            return self.kv_bytes()
        return SLOTS * self._kv_bytes(max(self.sizes.kv_widths, default=0)) if self.on_gpu else 0

    @property
    def cache_device_bytes(self) -> int:
        """Keys and values on the device, and other state."""
        return self.kv_device_bytes + self.state_bytes()

    @property
    def min_cache_device_bytes(self) -> int:
        """The part of `cache_device_bytes` that is needed in any case: transformers' own cache drops what has left a sliding window."""
        text = self.spec.text_config
        window = getattr(text, "sliding_window", None) or getattr(text, "attention_chunk_size", None)
        if self.config.kv_offload or not window:
            return self.cache_device_bytes
        return self.kv_bytes(min(self.length, window - 1)) + self.state_bytes()

    @property
    def kv_host_bytes(self) -> int:
        return self.kv_bytes() if self.config.kv_offload else 0

    @property
    def activation_bytes(self) -> int:
        """Of a rank's prefill, at its peak."""
        return self.empty_model.activation_bytes(self.spec, self.rank_batch, self.config.prompt_len)

    def _kv_bytes(self, width: int, length: int | None = None) -> int:
        positions = self.length if length is None else length
        return self.rank_batch * positions * width * self.spec.dtype.itemsize


@dataclass(frozen=True)
class Footprint:
    """Bytes that the weights of one rank take at each place while it runs.

    Attributes:
        gathered: the part of `device` that is an upper bound, above all what an engine holds for a moment; the rest is exact.
        pinned: the part of `host` that is page-locked.
        loading: most host memory while the weights are loaded, where that is known to be more than stays; without a GPU that of
            `device` is part of it.
    """

    device: int = 0
    gathered: int = 0
    host: int = 0
    pinned: int = 0
    disk: int = 0
    loading: int = 0


@dataclass(frozen=True)
class EnginePlan:
    """What an engine will do with the weights. Engines add what they need for loading.

    Attributes:
        pinned: whether the weights that wait in host memory are page-locked.
        weight_bytes: of all weights, over all ranks, as the engine stores them.
        fetched_bytes, disk_bytes: of weights, over all ranks, that a decode step brings to the devices, and reads from disk. One that two
            modules share counts as often as it is brought.
        sharded_bytes: of weights that lie on the devices in parts, one a rank, and are brought together in each pass.
        cpu_bytes: of weights, keys and values, over all ranks, that the host's cores read in a decode step.
        copies_kv: whether keys and values in host memory cross the link; else the cores attend over them.
        preallocated_cache: keys and values have all their memory from the start; else they grow, as transformers' own cache does.
    """

    job: Job
    footprint: Footprint
    pinned: bool
    weight_bytes: int = field(kw_only=True)
    fetched_bytes: int = field(default=0, kw_only=True)
    disk_bytes: int = field(default=0, kw_only=True)
    sharded_bytes: int = field(default=0, kw_only=True)
    cpu_bytes: int = field(default=0, kw_only=True)
    copies_kv: bool = field(default=True, kw_only=True)
    preallocated_cache: bool = field(default=False, kw_only=True)

    @property
    def device_peak_bytes(self) -> int:
        """Most device memory of a rank: in the prefill, or at the last step where keys and values grow until then, while those of a
        layer are copied or tokens are chosen."""
        job, workspace = self.job, MATMUL_WORKSPACE_BYTES if self.job.on_gpu else 0
        if self.preallocated_cache or job.config.kv_offload:
            stays = job.config.kv_offload and not self.copies_kv  # the cores attend where keys and values lie
            on_device = job.state_bytes() if stays else job.cache_device_bytes
            return self.footprint.device + workspace + on_device + job.activation_bytes
        chosen = job.rank_batch * logits_bytes(job.spec)
        last_step = self.footprint.device + job.cache_device_bytes + max(job.growing_kv_bytes, chosen)
        return workspace + max(self.prefill_bytes + job.activation_bytes, last_step)

    @property
    def prefill_bytes(self) -> int:
        """Most of weights, and keys and values that grow, that are on the device at once in a prefill."""
        length = self.job.config.prompt_len
        return self.footprint.device + self.job.kv_bytes(length) + self.job.state_bytes(length)

    def host_peak_bytes(self, measuring_bytes: int = 0) -> int:
        """Most host memory of a rank beside its libraries, the device's included where there is no GPU: while the weights are loaded, while
        the run measures the machine, or while it generates.

        Args:
            measuring_bytes: that the measurement takes while nothing but the weights is there, and layers that are to be compared, for
                which nothing has to be free.
        """
        job, weights = self.job, self.footprint
        on_device = 0 if job.on_gpu else weights.device - weights.gathered
        generating = weights.host + job.kv_host_bytes + (0 if job.on_gpu else self.device_peak_bytes)
        beside = measuring_bytes + self.compared_bytes if measuring_bytes else 0
        return max(weights.loading, weights.host + on_device + beside, generating)

    @property
    def compared_bytes(self) -> int:
        """Bytes of the layers that a run keeps in host memory until it has compared the loaded model's with them."""
        found = self.job.empty_model.cached(
            "compared", lambda: sum(first_layer_bytes(self.job.empty_model.model).values())
        )
        return min(found, COMPARED_BYTES)

    def quantize_dequantize(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Return `values` of parameter `name` as products see them: quantized and back, where this engine quantizes it."""
        return values

    def prepare(self) -> None:
        """Compile what `load` needs, if that was not done on this machine before. A second call does nothing."""

    def alternative(self) -> EnginePlan | None:
        """The same run planned otherwise, to be preferred where it is predicted to decode faster; None where there is nothing to choose."""
        return None

    def without_short_prompts(self) -> EnginePlan | None:
        """Return the same plan with all of each prompt computed by the device; None where this plan does so."""
        return None

    def exchanged_bytes(self, fetched_bytes: int) -> float:
        """Of weights, that each of several GPUs gets from the others in a pass that fetches `fetched_bytes` over all links."""
        ranks = self.job.ranks.world_size
        return (fetched_bytes + self.sharded_bytes) * (ranks - 1) / ranks

    @property
    def min_free_device_bytes(self) -> int:
        """That a device has to have for the engine to make this plan."""
        return self.device_peak_bytes

    @functools.cached_property
    def cost_terms(self) -> CostTerms:
        """What the cost model needs to know of how this engine runs the plan."""
        return CostTerms(
            prefill_fetched_bytes=self.fetched_bytes,
            dequantizes_on_cpu=self.job.config.quantized and not self.job.on_gpu,
        )

    def rebalanced_s(self, link_s: float, others_s: float) -> tuple[float, float]:
        """Return the seconds of a decode step's copies, and of device and CPU, after a run has moved blocks between link and CPU.

        Args:
            link_s, others_s: the same as placed.
        """
        return link_s, others_s

    def overlapped_s(self, link_s: float, others_s: float) -> float:
        """Return the seconds of a decode step whose copies, and device and CPU, take so long, with what they wait for each other."""
        return max(link_s, others_s)

    def measure_dequantized_gb_per_s(self, dtype: torch.dtype) -> float | None:
        """Return the rate at which this engine's own operator dequantizes to `dtype` and multiplies with one token, measured on the device
        while a model is loaded; None for an engine without such an operator."""
        return None

    @property
    def gpu_memory_bytes(self) -> int | None:
        """Bytes that `--gpu-memory` has to name for the same plan; None for an engine without that option."""
        return None

    @property
    def ring_depth(self) -> int | None:
        """Slots that `--ring-depth` has to name for the same plan; None where the option is not needed."""
        return None

    @property
    def measures_link_with_weights(self) -> bool:
        """Whether a run measures the link by copies of the weights themselves, and needs no host memory for that."""
        return False

    @property
    def copied_kv_layers(self) -> int:
        """Layers whose keys and values cross the link in each step."""
        crosses = self.job.on_gpu and self.job.config.kv_offload and self.copies_kv
        return len(self.job.sizes.kv_widths) if crosses else 0

    @property
    def copied_kv_bytes(self) -> int:
        """Of keys and values, over all ranks, that cross the link in a decode step of mean length."""
        return self.job.ranks.world_size * self.job.mean_kv_bytes if self.copied_kv_layers else 0

    def moved_per_step(self) -> MovedPerStep:
        """What a decode step of mean length moves, over all ranks."""
        job, ranks = self.job, self.job.ranks.world_size
        return MovedPerStep(
            host_to_device_bytes_per_step=self.fetched_bytes + self.copied_kv_bytes,
            device_to_host_bytes_per_step=ranks * job.kv_bytes(1) if self.copied_kv_layers else 0,
            disk_read_bytes_per_step=self.disk_bytes,
            cores_bytes_per_step=self.cpu_bytes or None,
        )

    def in_words(self) -> list[str]:
        """Return lines about what a decode step moves and what computes it."""
        if not self.fetched_bytes:
            return []
        disk = f"{format_bytes(self.disk_bytes)} {{}}from disk" if self.disk_bytes else ""
        if not (
            self.job.on_gpu or self.cost_terms.copies_within_host
        ):  # weights in host memory are used where they are
            return [f"each decode step reads {disk.format('')}"] if disk else []
        return [f"each decode step {self.describe_copies()}{', ' * bool(disk)}{disk.format('of it ')}"]

    def dequantization_warning(self) -> list[str]:
        """Return a warning if a CPU dequantizes weights in every step."""
        if not self.cost_terms.dequantizes_on_cpu:
            return []
        other = "" if self.job.config.engine == "stream" else "; --engine stream multiplies them as stored"
        return [f"without a GPU, weights are dequantized in every step: slower than 16 bits{other}"]

    def describe_copies(self) -> str:
        """Return such as "copies 20.4 GiB over the link"."""
        fetched = format_bytes(self.fetched_bytes) if self.fetched_bytes else "nothing"
        return f"copies {fetched} {'over the link' if self.job.on_gpu else 'within host memory'}"

    def places_in_words(self) -> str:
        """Return where the weights are: on disk, in host memory or on the device."""
        if self.footprint.disk:
            return "on disk"
        return "in host memory" if self.footprint.host or not self.job.on_gpu else "on the device"

    @property
    def why_whole_layers(self) -> str:
        """Why a step of a mixture copies experts that no token chose, in a few words."""
        return "it fetches whole layers"


class Timeline(Protocol):
    """An engine's own record of its copies and layers."""

    def restart(self) -> None:
        """Forget everything: a generation begins."""

    def link_use(self) -> LinkUse | None:
        """What this rank's link did in the decode steps of the last generation; None before the second of them."""

    def write_chrome_trace(self, path: Path) -> None:
        """Write the last generation as a Chrome trace."""


@dataclass
class LoadedModel:
    """A model ready for `generate` and what the record says of it.

    Attributes:
        model: the transformers model to call; inputs go to `device`.
        weight_bytes: bytes of all weights as this engine stores them, quantized and over all ranks.
        transfers: counters that rise while the model runs.
        facts: fields of `records.schema.EngineFacts` and their values; others are refused.
        close: releases what the engine holds (files, patches); safe to call twice.
        timeline: when layers were copied and computed, of an engine that keeps it.
        preallocated_cache: the engine is made for a KV cache that takes no memory while the model runs.
        cores: how the host's cores take part; None where they do not.
        cpu_attention: computes attention over a KV cache in host memory, where the CPU does.
        pinned_memory: uint8 [bytes] each, the host memory that this rank's device copies weights from, where the engine has it so.
        steps_to_settle: consecutive decode steps until the engine's next choice of how it runs them; 0 when nothing is left to choose.
            The same on all ranks.
        modules_changed: told modules whose children were wrapped or replaced, or that have hooks of others: from now on the engine calls
            each module in them, in every pass, and computes no block of them as a whole.
        writable: parameters that stay where they are, so that a model may write them itself, as RWKV does.
    """

    model: Any
    device: torch.device
    dtype: torch.dtype
    weight_bytes: int
    transfers: Transfers = field(default_factory=Transfers)
    facts: dict[str, Any] = field(default_factory=dict)
    close: Callable[[], None] = lambda: None
    timeline: Timeline | None = None
    preallocated_cache: bool = False
    pinned_memory: Sequence[torch.Tensor] = ()
    cores: CpuBackendUse | None = None
    cpu_attention: CpuAttention | None = None
    steps_to_settle: Callable[[], int] = lambda: 0
    modules_changed: Callable[[set[torch.nn.Module]], None] = lambda modules: None
    writable: Sequence[torch.nn.Parameter] = ()


def refuse_written_weights(job: Job) -> None:
    """Raises UsageError for a model that changes its own weights, of an engine that brings them for each pass: the change would be lost."""
    if job.sizes.writes_weights:
        raise UsageError(
            f"--engine {job.config.engine}: {job.spec.text_config.model_type} changes its weights when it is first called, and this engine "
            "brings them anew for each pass; use --engine stream or --engine resident."
        )


def no_communicator(ranks: Ranks) -> None:
    """The `connect` of an engine that brings ranks together by the default process group alone."""
