"""The engine protocol: plan, check, load.

An engine is a module with these functions:

    plan(job) -> EnginePlan                  decide where weights are stored; loads nothing; ranks do not communicate; raises UsageError
    check(plan)                              check compilers, libraries and disks, but not memory; raises UsageError
    load(plan, progress) -> LoadedModel      raises RunError if loading fails
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from zero_inference.config.options import PAGE_LOCKING_ENGINES, SHORT_DTYPES
from zero_inference.config.run_config import RunConfig
from zero_inference.errors import UsageError
from zero_inference.hardware.machine import Machine
from zero_inference.kernels.decode_attention import attention_of
from zero_inference.kernels.formats import WeightFormat
from zero_inference.kv_cache.attention_patch import takes_step_masks, window_only_in_cache
from zero_inference.kv_cache.cpu_attention import CpuAttention, CpuAttentionCache
from zero_inference.kv_cache.device import (
    DeviceKVCache,
    PreallocatedCache,
    sees_all_positions,
    supports_preallocated,
    why_not_offloaded,
)
from zero_inference.kv_cache.host import SLOTS, HostKVCache
from zero_inference.models.empty_model import EmptyModel, ModelSizes, cache_class, logits_bytes
from zero_inference.models.layers import COMPARED_BYTES, find_layers, first_layer_bytes
from zero_inference.models.spec import ModelSpec
from zero_inference.models.stored_weights import stored_formats
from zero_inference.records.schema import CpuBackendUse, MovedPerStep
from zero_inference.utils.format import format_bytes
from zero_inference.utils.ranks import Ranks
from zero_inference.utils.timing import Transfers

LoadProgress = Callable[[int], None]  # gets the bytes of each loaded parameter
SAMPLING_BYTES = 56  # for each logit while a token is sampled: float32 scores and their sort with int64 indices
NOISE_BYTES = 8  # the same for the noise, which has the rows of all ranks
MATMUL_WORKSPACE_BYTES = 32 << 20  # PyTorch's cuBLAS workspace on Hopper; smaller on other GPUs


class CacheShare(NamedTuple):
    """A device's share (0 to 1) of keys and values, and of recurrent state and indexer keys."""

    kv: float = 1.0
    state: float = 1.0


@dataclass(frozen=True)
class Job:
    """A run as an engine sees it, with the sizes that follow from its options."""

    config: RunConfig
    spec: ModelSpec
    ranks: Ranks
    empty_model: EmptyModel
    free_by_device: tuple[int, ...]  # of each of `devices`, or of the connected rank with the least; empty for a CPU
    machine: Machine = Machine()
    # Devices that this process drives, `ranks.device` by default. The first one has embedding, head, inputs and outputs.
    devices: tuple[torch.device, ...] = ()
    # For a draft of the same model with fewer bits: the stream engine's plan of the target model. The draft uses its weights outside of
    # blocks and in its `shared` blocks, and leaves out the layers `skipped`.
    target: Any = None
    shared: frozenset[int] = frozenset()
    skipped: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if not self.devices:
            object.__setattr__(self, "devices", (self.ranks.device,))

    @property
    def stored_formats(self) -> Mapping[str, tuple[WeightFormat, bool]]:
        """Parameter -> (format, stored transposed) of the weights that are kept as the checkpoint stores them."""
        if self.spec.kept_format(self.config) is None:
            return {}
        model = self.empty_model.model
        key = "stored formats", self.spec.weights_are_here
        return self.empty_model.cached(key, lambda: stored_formats(model, self.spec))

    @property
    def quant_bits(self) -> int:
        """Bits of most stored weights: 16 or more if they are not quantized, 8 or 4."""
        kept = self.spec.kept_format(self.config)
        return self.config.bits_of_plain if kept is None else kept.bits

    @property
    def quantized(self) -> bool:
        return self.quant_bits < 16

    @property
    def format_name(self) -> str:
        """Name of the format of most weights, such as bf16, int4 or MXFP4."""
        kept = self.spec.kept_format(self.config)
        if kept is not None:
            return kept.name
        return f"int{self.quant_bits}" if self.quantized else SHORT_DTYPES[self.spec.dtype_name]

    @property
    def conversion(self) -> str | None:
        """Describe how loading converts a quantized checkpoint; None if it keeps its own format, or is not quantized."""
        stored = None if self.spec.dummy else self.spec.checkpoint_format
        if stored is None or self.spec.kept_format(self.config) is not None:
            return None
        kept = "--quant-bits stored keeps them" if self.config.engine == "stream" else "--engine stream keeps them"
        if self.config.quantized:
            return f"the checkpoint's {stored.name} weights are rounded a second time, to {self.format_name}; {kept}"
        return f"the checkpoint's {stored.name} weights are expanded to {self.spec.dtype_name}; {kept}"

    @property
    def num_gpus(self) -> int:
        """GPUs of the whole run, each with a link; 1 for a CPU."""
        return len(self.devices) * self.ranks.world_size

    @property
    def free_device_bytes(self) -> int | None:
        """The least free bytes of a device; None for a CPU, whose device is host memory."""
        return min(self.free_by_device, default=None)

    @property
    def sizes(self) -> ModelSizes:
        return self.empty_model.sizes

    @property
    def on_gpu(self) -> bool:
        return self.ranks.device.type == "cuda"

    @property
    def rank_batch(self) -> int:
        return self.config.batch_size // self.ranks.world_size

    @property
    def step_tokens(self) -> int:
        """Most tokens of a rank's decode step; speculation verifies several of each sequence."""
        if self.config.speculate is None:
            return self.rank_batch
        return self.rank_batch * (self.config.most_proposals + 1)

    @property
    def length(self) -> int:  # prompt and generated tokens of a sequence
        return self.config.positions

    @property
    def layer_parameters(self) -> float:
        """Parameters that a token uses in a decoder layer, on average; 0 if layers are not found."""
        model, sizes = self.empty_model.model, self.sizes
        layers, head = find_layers(model)[1], model.get_output_embeddings()
        outside = 0 if head is None else sum(each.numel() for each in head.parameters())
        return (sizes.parameters - sizes.idle_parameters - outside) / len(layers) if layers else 0.0

    @property
    def pin_weights(self) -> bool:
        """True if weights in host memory are to be pinned, by default those that a GPU copies."""
        if self.config.offload == "gpu" or self.config.engine not in PAGE_LOCKING_ENGINES:
            return False
        return self.on_gpu if self.config.pin_memory is None else self.config.pin_memory

    def kv_bytes(self, length: int | None = None) -> int:
        """Return the bytes of a rank's KV cache at `length` positions (default: all), in the model's dtype.

        Sliding windows are ignored: this package's caches hold all positions.
        """
        return self._kv_bytes(sum(self.sizes.kv_widths), length)

    def _kv_bytes(self, width: int, length: int | None = None) -> int:
        return self.rank_batch * (self.length if length is None else length) * width * self.spec.dtype.itemsize

    @property
    def mean_kv_bytes(self) -> int:
        """KV bytes that a mean decode step reads: step i of 1 to G - 1 reads P + i positions, on average P + G / 2."""
        return self.kv_bytes(2 * self.config.prompt_len + self.config.gen_len) // 2

    @property
    def largest_layer_kv_bytes(self) -> int:
        return self._kv_bytes(max(self.sizes.kv_widths, default=0))

    def state_bytes(self, length: int | None = None) -> int:
        """Return the bytes of a rank's recurrent state and indexer keys, always on the device, at `length` positions (default: all)."""
        positions = self.length if length is None else length
        return self.rank_batch * (self.sizes.state_bytes + positions * self.sizes.position_state_bytes)

    @property
    def window_only_in_cache(self) -> bool:
        """True if only transformers' own cache applies a sliding window, by dropping positions: the masks ignore it."""
        if sees_all_positions(self.spec.config, self.length):
            return False
        return self._tried("window_only_in_cache", window_only_in_cache)

    @property
    def takes_step_masks(self) -> bool:
        """True if decode steps with given masks, and with our attention where the model's is "eager", compute what the model does."""
        if attention_of(self.empty_model.model) == "sdpa" and sees_all_positions(self.spec.config, self.length):
            return True
        return self._tried("takes_step_masks", takes_step_masks)

    def _tried(self, name: str, trial: Callable[[Any], bool]) -> bool:
        """Return the result of a trial on the model, made once while it is empty; False if it was filled before."""
        if not self.empty_model.is_empty:
            return self.empty_model.facts.get(name, False)
        return self.empty_model.cached(name, lambda: trial(self.empty_model.model))

    @property
    def kv_device_bytes(self) -> int:
        """KV bytes on the device: all, or the slots that layers in host memory are copied into for a GPU."""
        if not self.config.kv_offload:
            return self.kv_bytes()
        return SLOTS * self.largest_layer_kv_bytes if self.on_gpu else 0

    @property
    def cache_device_bytes(self) -> int:  # KV cache and other state
        return self.kv_device_bytes + self.state_bytes()

    def cache_share_on(self, device: int, layer_devices: Sequence[int]) -> CacheShare:
        """Return what a device has of the cache of its layers: in a hybrid model some have keys and values, and the others a state.

        Args:
            layer_devices: the device of each layer; empty if all are on the first one.
        """
        if not layer_devices:
            return CacheShare() if device == 0 else CacheShare(0.0, 0.0)
        widths, layers = self.sizes.kv_width_by_layer, len(layer_devices)
        if len(widths) != layers or 0 not in widths or not any(widths):
            return CacheShare(*[layer_devices.count(device) / layers] * 2)
        own = [width for width, each in zip(widths, layer_devices) if each == device]
        return CacheShare(sum(own) / sum(widths), own.count(0) / widths.count(0))

    def cache_bytes_on(self, share: CacheShare) -> int:
        """Return the `cache_device_bytes` of a device with a share of the cache. Keys and values in host memory have slots on each."""
        part = float(share.kv > 0) if self.config.kv_offload else share.kv
        return math.ceil(part * self.kv_device_bytes) + math.ceil(share.state * self.state_bytes())

    def min_cache_bytes_on(self, share: CacheShare) -> int:
        """Return a lower bound of `cache_bytes_on`: transformers' own cache drops positions that left a sliding window."""
        text = self.spec.text_config
        window = getattr(text, "sliding_window", None) or getattr(text, "attention_chunk_size", None)
        if self.config.kv_offload or not window:
            return self.cache_bytes_on(share)
        kv_bytes = self.kv_bytes(min(self.length, window - 1))
        return math.ceil(share.kv * kv_bytes) + math.ceil(share.state * self.state_bytes())

    @property
    def kv_host_bytes(self) -> int:
        return self.kv_bytes() if self.config.kv_offload else 0

    @property
    def activation_bytes(self) -> int:  # peak of a rank's prefill, or of a pass that verifies proposals
        model, batch = self.empty_model, self.rank_batch
        vocab_size = self.spec.text_config.vocab_size
        row_bytes = batch * SAMPLING_BYTES + self.config.batch_size * NOISE_BYTES
        sampling = 0 if self.config.temperature is None else vocab_size * row_bytes
        prefill = max(sampling, model.activation_bytes(self.spec, batch, self.config.prompt_len))
        if self.config.speculate is None:
            return prefill
        verification, logits = self._verification_bytes()
        return max(prefill, max(sampling, verification) + logits)

    def _verification_bytes(self) -> tuple[int, int]:
        """Return the peak of activations in a pass that verifies proposals, and its logits."""
        tokens, batch = self.step_tokens, self.rank_batch
        activations = self.empty_model.activation_bytes(self.spec, batch, tokens // batch)
        return activations, tokens * self.spec.text_config.vocab_size * self.spec.dtype.itemsize

    @property
    def pass_graph_bytes(self) -> int:
        """Memory that the CUDA graph of such a pass keeps, also during a prefill."""
        return 0 if self.config.speculate is None else sum(self._verification_bytes())


@dataclass(frozen=True)
class Footprint:
    """Bytes of one rank's weights."""

    device: int = 0
    gathered: int = 0  # part of `device` that is an upper bound, mostly weights that are gathered for one module
    host: int = 0
    pinned: int = 0  # part of `host`
    disk: int = 0
    loading: int = 0  # peak host memory of loading, if known to exceed what stays; without a GPU it includes `device`


class CpuWork(NamedTuple):
    """Work of the CPU backend in one pass."""

    layer_share: float = 0.0  # share (0 to 1) of the bytes of decoder layers without experts that it multiplies
    expert_share: float = 0.0  # the same of experts
    wait_s: float = 0.0  # seconds that the device waits for it


@dataclass(frozen=True)
class CostTerms:
    """The defaults are an engine that copies what it needs while the device computes everything.

    Attributes:
        prefill_link_gb_per_s: rate of all links in a prefill; None where it is the rate of plain copies.
        link_beside_cpu_gb_per_s, cpu_beside_link_gb_per_s: rates of all links and of the CPU while both work in a step; None where the
            CPU backend is not used.
        overhead_negligible: hooks and dequantization may be left out where they were not measured; otherwise times are lower bounds.
        head_plain_bytes, head_stored_bytes: an output head that is quantized on its own, in the model's dtype and as stored.
        step_cpu, prefill_cpu: work of the CPU backend in a decode step and in a prefill.
        cpu_rate_unknown: a run would use the CPU backend, but its rate is unknown, so the plan leaves it out.
    """

    prefill_fetched_bytes: int  # bytes of weights that a prefill copies to the devices, over all ranks
    prefill_disk_bytes: int | None = None  # read from disk in a prefill; None: as in a decode step
    chosen_expert_bytes: int = 0  # part of a step's fetched bytes that are experts which tokens chose
    prefill_link_gb_per_s: float | None = None
    link_beside_cpu_gb_per_s: float | None = None
    cpu_beside_link_gb_per_s: float | None = None
    copies_overlap: bool = True  # the device computes while weights are copied
    copies_wait_for_host: bool = False  # the host requests the next copies only after it has seen the last ones arrive
    copies_within_host: bool = False  # without a GPU, weights in host memory are copied before use
    fetches: int = 0  # copies of weights that the host requests in a pass, one by one
    resident_quantized_blocks: int = 0  # quantized blocks on the device; the host launches operators for each of them
    graphs: bool = False  # decode steps are CUDA graphs, so the host launches no operators
    overhead_negligible: bool = True
    fused_rows: int = 0  # most tokens that the device multiplies with codes directly; for more it dequantizes first
    head_plain_bytes: int = 0
    head_stored_bytes: int = 0
    quantizes_all: bool = False  # embedding and head are quantized with the layers
    dequantizes_on_cpu: bool = False  # without a GPU, weights are dequantized in each pass
    step_cpu: CpuWork = CpuWork()
    prefill_cpu: CpuWork = CpuWork()
    cpu_attention_layers: int = 0  # layers whose attention the CPU computes
    cpu_alone_s: float = 0.0  # seconds of the CPU's products of a step while the link is idle; 0 where unknown
    cpu_rate_unknown: bool = False
    depends_on_routing: bool = False  # the bytes that a step moves depend on the experts that tokens choose


@dataclass(frozen=True)
class EnginePlan:
    """Where an engine will store the weights and what it will move. Engines add fields that `load` needs.

    Attributes:
        fetched_bytes, disk_bytes: weights that a decode step copies to the devices and reads from disk, over all ranks. A weight that two
            modules share counts each time that it is copied.
        sharded_bytes: weights on the devices that are sharded over the ranks and gathered in each pass.
        cpu_bytes: weights, keys and values that the CPU backend reads in a decode step, over all ranks.
        copies_kv: a KV cache in host memory is copied over the link; otherwise the CPU computes its attention.
        preallocated_cache: the KV cache has its final size from the start; otherwise it grows as transformers' own does.
    """

    job: Job
    footprint: Footprint
    pinned: bool  # weights in host memory are pinned
    weight_bytes: int = field(kw_only=True)  # all weights, over all ranks, as the engine stores them
    fetched_bytes: int = field(default=0, kw_only=True)
    disk_bytes: int = field(default=0, kw_only=True)
    sharded_bytes: int = field(default=0, kw_only=True)
    cpu_bytes: int = field(default=0, kw_only=True)
    copies_kv: bool = field(default=True, kw_only=True)
    preallocated_cache: bool = field(default=False, kw_only=True)

    @property
    def device_peak_bytes(self) -> int:
        """Peak memory of the device of a rank, or of the one that has most: in the prefill, or at the last step if the cache grows."""
        return max(self.peak_bytes_on(device) for device in range(len(self.job.devices)))

    def peak_bytes_on(self, device: int) -> int:
        """Return the peak memory of one of `job.devices`, by its index."""
        if device and device not in self.layer_devices:
            return 0  # it computes nothing
        job, workspace = self.job, MATMUL_WORKSPACE_BYTES if self.job.on_gpu else 0
        weights, share = self.weight_bytes_on(device), self.cache_share_on(device)
        if self.preallocated_cache or job.config.kv_offload or job.config.speculate:
            cpu_attention = job.config.kv_offload and not self.copies_kv
            cache = math.ceil(share.state * job.state_bytes()) if cpu_attention else job.cache_bytes_on(share)
            return weights + workspace + cache + job.activation_bytes + self.graph_bytes
        logits = job.rank_batch * logits_bytes(job.spec)
        # a layer's keys (or values) exist twice while a growing cache is copied
        last_step = weights + job.cache_bytes_on(share) + max(job.largest_layer_kv_bytes // 2, logits)
        return workspace + max(self.prefill_bytes_on(device) + job.activation_bytes, last_step)

    def prefill_bytes_on(self, device: int) -> int:
        """Return the peak bytes of weights and growing KV cache on a device in a prefill."""
        job, length, share = self.job, self.job.config.prompt_len, self.cache_share_on(device)
        cache = math.ceil(share.kv * job.kv_bytes(length) + share.state * job.state_bytes(length))
        return self.weight_bytes_on(device) + cache

    def host_peak_bytes(self, measuring_bytes: int = 0) -> int:
        """Return the peak host memory of a rank without libraries, in loading, measuring or generating; includes a CPU's device memory.

        Args:
            measuring_bytes: buffers of a measurement that runs while only weights, and layers to compare, are in memory.
        """
        job, weights = self.job, self.footprint
        on_device = 0 if job.on_gpu else weights.device - weights.gathered
        generating = weights.host + job.kv_host_bytes + (0 if job.on_gpu else self.device_peak_bytes)
        if measuring_bytes:
            model = job.empty_model
            compared = model.cached("compared", lambda: sum(first_layer_bytes(model.model).values()))
            measuring_bytes += min(compared, COMPARED_BYTES)
        return max(weights.loading, weights.host + on_device + measuring_bytes, generating)

    # Engines may override these

    @property
    def layer_devices(self) -> Sequence[int]:
        """The device of each decoder layer, by its index in `job.devices`; empty if all are on the first one."""
        return ()

    @property
    def uses_disk(self) -> bool:
        return bool(self.disk_bytes)

    @property
    def prefill_micro_batches(self) -> int:
        """Micro-batches of a prefill, which several devices compute at the same time."""
        return 1

    def cache_share_on(self, device: int) -> CacheShare:
        return self.job.cache_share_on(device, self.layer_devices)

    def weight_bytes_on(self, device: int) -> int:
        """Return the bytes of weights, ring slots and workspace on a device."""
        return self.footprint.device if device == 0 else 0

    def fetched_bytes_on(self, device: int) -> int:
        """Return the part of `fetched_bytes` that crosses the link of a device."""
        return self.fetched_bytes if device == 0 else 0

    def min_free_bytes_on(self, device: int) -> int:
        """Return the bytes that have to be free on a device."""
        return self.peak_bytes_on(device)

    def quantize_dequantize(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Return the `values` of parameter `name` after quantizing and dequantizing, if this engine quantizes it."""
        return values

    def prepare(self) -> None:
        """Compile what `load` needs, once per machine."""

    def alternative(self) -> EnginePlan | None:
        """Return another plan of this run, to prefer if it is predicted to decode faster; None if there is none."""
        return None

    def without_short_prompts(self) -> EnginePlan | None:
        """Return this plan without CPU-computed blocks in the prefill of short prompts; None if it has none."""
        return None

    def exchanged_bytes(self, fetched_bytes: int) -> float:
        """Return the weight bytes that each GPU receives from the others in a pass that copies `fetched_bytes` over all links."""
        ranks = self.job.ranks.world_size
        return (fetched_bytes + self.sharded_bytes) * (ranks - 1) / ranks

    @functools.cached_property
    def cost_terms(self) -> CostTerms:
        return CostTerms(
            prefill_fetched_bytes=self.fetched_bytes,
            dequantizes_on_cpu=self.job.quantized and not self.job.on_gpu,
        )

    def rebalanced_s(self, link_s: float, compute_s: float) -> tuple[float, float]:
        """Return (link, compute) seconds of a decode step after rebalancing; compute is of device and CPU."""
        return link_s, compute_s

    def overlapped_s(self, link_s: float, compute_s: float) -> float:
        """Return the seconds of a decode step, including waits, from those of its copies and of device and CPU."""
        return max(link_s, compute_s)

    def measure_dequantized_gb_per_s(self, dtype: torch.dtype) -> float | None:
        """Return the GB/s (of `dtype`) that the loaded engine dequantizes and multiplies with one token, by an operator of its own."""
        return None

    @property
    def gpu_memory_bytes(self) -> int | None:
        """`--gpu-memory` in bytes that gives this plan."""
        return None

    @property
    def ring_depth(self) -> int | None:
        """`--ring-depth` that gives this plan; None if the default does."""
        return None

    @property
    def measures_link_with_weights(self) -> bool:
        """True if the link is measured with copies of weights, which needs no other host memory."""
        return False

    @property
    def shared_layers(self) -> int:
        """Layers of a draft whose weights are those of the target model."""
        return 0

    @property
    def graph_bytes(self) -> int:
        """Memory that CUDA graphs keep on each device."""
        return 0

    @property
    def copied_kv_layers(self) -> int:
        """Layers whose KV cache is copied over the link in each step."""
        copied = self.job.on_gpu and self.job.config.kv_offload and self.copies_kv
        return len(self.job.sizes.kv_widths) if copied else 0

    @property
    def copied_kv_bytes(self) -> int:
        """KV bytes copied over the link in a mean decode step, over all ranks."""
        return self.job.ranks.world_size * self.job.mean_kv_bytes if self.copied_kv_layers else 0

    def moved_per_step(self) -> MovedPerStep:
        """Return the bytes moved in a mean decode step, over all ranks."""
        job, ranks = self.job, self.job.ranks.world_size
        return MovedPerStep(
            host_to_device_bytes_per_step=self.fetched_bytes + self.copied_kv_bytes,
            device_to_host_bytes_per_step=ranks * job.kv_bytes(1) if self.copied_kv_layers else 0,
            disk_read_bytes_per_step=self.disk_bytes,
            cores_bytes_per_step=self.cpu_bytes or None,
        )

    def in_words(self) -> list[str]:
        """Return lines about what a decode step moves and where it is computed."""
        disk = format_bytes(self.disk_bytes)
        if self.fetched_bytes and (self.job.on_gpu or self.cost_terms.copies_within_host):
            return [f"each decode step {self.describe_copies()}" + f", {disk} of it from disk" * bool(self.disk_bytes)]
        return [f"each decode step reads {disk} from disk"] if self.disk_bytes else []

    def dequantization_warning(self) -> list[str]:
        """Return a warning if a CPU dequantizes weights in every step."""
        if not self.cost_terms.dequantizes_on_cpu:
            return []
        other = "" if self.job.config.engine == "stream" else "; --engine stream multiplies them as stored"
        return [f"without a GPU, weights are dequantized in every step: slower than 16 bits{other}"]

    def describe_copies(self) -> str:
        """Return a text such as "copies 20.4 GiB over the link"."""
        fetched = format_bytes(self.fetched_bytes) if self.fetched_bytes else "nothing"
        links = f"over the link{'s' * (self.job.num_gpus > 1)}"
        return f"copies {fetched} {links if self.job.on_gpu else 'within host memory'}"

    def describe_location(self) -> str:
        """Return where the weights are stored, such as "on disk"."""
        if self.footprint.disk:
            return "on disk"
        return "in host memory" if self.footprint.host or not self.job.on_gpu else "on the device"

    @property
    def why_whole_layers(self) -> str:
        """Reason why a step of an MoE model copies experts that no token chose."""
        return "it fetches whole layers"


@dataclass
class LoadedModel:
    """A model ready for `generate`, with the facts for its record.

    Attributes:
        facts: values of fields of `records.schema.EngineFacts`; other keys are errors.
        pinned_memory: uint8 [bytes] each, pinned host memory that this rank's device copies weights from.
        steps_to_settle: returns the decode steps of a generation until the engine next changes how it runs them, equal on all ranks; 0 when
            settled.
        settling_steps: returns how many steps so far prepared, captured or verified a graph or rebalanced; they take longer than others.
        modules_changed: gets modules whose children were replaced or that have foreign hooks: the engine then calls each module inside.
        writable: parameters that stay in place, so that a model may write them, as RWKV does; empty with the engine resident: all.
    """

    model: Any  # the transformers model; inputs go to `device`
    device: torch.device
    dtype: torch.dtype
    weight_bytes: int  # all weights as stored, over all ranks
    transfers: Transfers = field(default_factory=Transfers)  # byte counters, updated in each pass
    facts: dict[str, Any] = field(default_factory=dict)
    close: Callable[[], None] = lambda: None  # releases files and patches; safe to call twice
    timeline: Any = None  # stream.streams.Timeline of copies and layers, if the engine records them
    preallocated_cache: bool = False  # the engine needs a KV cache that allocates nothing while the model runs
    pinned_memory: Sequence[torch.Tensor] = ()
    cpu_backend: CpuBackendUse | None = None  # how the CPU backend takes part; None without one
    cpu_attention: CpuAttention | None = None  # computes attention over a KV cache in host memory, if the CPU does
    steps_to_settle: Callable[[], int] = lambda: 0
    settling_steps: Callable[[], int] = lambda: 0
    modules_changed: Callable[[set[torch.nn.Module]], None] = lambda modules: None
    writable: Sequence[torch.nn.Parameter] = ()
    devices: tuple[torch.device, ...] = ()  # all that this process drives, `device` first
    draft: LoadedModel | None = None  # the model that proposes tokens, of which this one is the target model
    measure_disk: Callable[[], float] | None = None  # returns GB/s of direct reads of its weights on disk
    weights: Any = None  # of the stream engine: what a draft of the same model shares

    def __post_init__(self) -> None:
        self.devices = self.devices or (self.device,)

    def cache_factory(self, config: RunConfig) -> Callable[[], PreallocatedCache] | None:
        """Return a function that gives each loop its KV cache, empty and in the same memory; None leaves the cache to transformers."""
        length, model_config = config.positions, self.model.config
        on_host = model_config, length, config.pin_kv_cache, config.async_kv_offload, self.transfers
        cache: PreallocatedCache
        if config.kv_offload and self.cpu_attention is not None:
            cache = CpuAttentionCache(*on_host, self.cpu_attention, cache_class(self.model))
        elif config.kv_offload:
            cache = HostKVCache(*on_host, cache_class(self.model))
        elif config.speculate or (self.preallocated_cache and supports_preallocated(self.model)):
            cache = DeviceKVCache(model_config, length)
        else:
            return None

        def make() -> PreallocatedCache:
            cache.reset()
            return cache

        return make


def refuse_speculation(job: Job, asked: str) -> None:
    """Raise UsageError where rejected tokens cannot be removed from the model's cache; `asked` is the option, for the message."""
    model = job.empty_model.model
    reason = why_not_offloaded(model)
    if reason is None and not supports_preallocated(model):
        reason = "has state besides keys and values"
    if reason is None and job.window_only_in_cache:
        reason = "has a sliding window that may be in transformers' cache alone"
    if reason is not None:
        raise UsageError(
            f"{asked} removes rejected tokens from the KV cache, and {job.spec.config.model_type} {reason}: drop --speculate."
        )


def refuse_written_weights(job: Job) -> None:
    """Raise UsageError for a model that changes its own weights, with an engine that copies them anew for each pass."""
    if job.sizes.writes_weights:
        raise UsageError(
            f"--engine {job.config.engine}: {job.spec.text_config.model_type} changes its weights in its first call, but this engine "
            "copies them anew for each pass; use --engine stream or --engine resident."
        )
