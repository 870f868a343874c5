"""What ZeRO-3 is given: each parameter quantized and partitioned as it comes, and counters where it fetches them back."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from zero_inference.engines.deepspeed.config import Places
from zero_inference.engines.deepspeed.quantization import QuantizationPlan, quantize_parameter
from zero_inference.engines.offload_folder import reserve
from zero_inference.utils.host_memory import host_empty
from zero_inference.utils.processes import defer_signals
from zero_inference.utils.ranks import Ranks
from zero_inference.utils.transfers import Transfers


class ParameterStore:
    """Takes parameters over one by one: quantizes them on the device and gives ZeRO-3 its partition of each.

    Args:
        context: DeepSpeed's `zero.Init`.
        in_layers: names of the parameters of decoder layers.

    Attributes:
        transfers: counters that rise while the model runs, once `count_transfers` was called.
        weight_bytes: of the parameters so far, as stored, over all ranks.
    """

    def __init__(
        self,
        context,
        quantization: QuantizationPlan | None,
        in_layers: set[str],
        places: Places,
        pinned: bool,
        ranks: Ranks,
    ):
        self.context, self.quantization, self.in_layers = context, quantization, in_layers
        self.places, self.pinned, self.ranks = places, pinned, ranks
        self.transfers = Transfers()
        self.weight_bytes = 0
        self.swapper = context.param_swapper if places.offload == "nvme" else None
        if self.swapper is not None:
            _reserve_before_writing(self.swapper)
            _hold_signals_while_counting(self.swapper)

    def close(self) -> None:
        """Wait for reads ahead, which an error or a signal in the middle of a pass leaves under way, and free the memory that libaio
        reads into: DeepSpeed aborts the process where a handle goes before it is done, and keeps that memory.

        Partitions may lie in it, so nothing may use the parameters any more.
        """
        if self.swapper is None:
            return
        self.swapper.synchronize_reads()
        if not self.swapper.use_gds:  # whose buffers are the device's, and go as any tensor does
            self.swapper.aio_read_handle.free_cpu_locked_tensor(self.swapper.buffers)
        self.swapper = None

    def adopt(self, name: str, parameter: torch.nn.Parameter) -> None:
        parameter.data = parameter.data.to(self.ranks.device)
        if self.quantization and name in self.quantization.names:
            quantize_parameter(parameter, self.quantization.settings)
        self.weight_bytes += parameter.numel() * parameter.element_size()
        self.context._convert_to_deepspeed_param(parameter)
        in_layer = name in self.in_layers
        if self.places.place(parameter, parameter.ds_numel, in_layer) == "host":
            self._place_in_host_memory(parameter)
        parameter.partition(has_been_updated=True)

    def _place_in_host_memory(self, parameter: torch.nn.Parameter) -> None:
        """What ZeRO-3 does at a first partition, in host memory of the exact size."""
        from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus

        aligned = self.context._aligned_size(parameter)
        share = aligned // self.ranks.world_size
        parameter.ds_tensor = host_empty((share,), parameter.dtype, self.pinned)
        parameter.ds_tensor.ds_numel = share
        parameter.ds_tensor.status = PartitionedParamStatus.AVAILABLE
        parameter.ds_tensor.final_location = None
        parameter.ds_numel_aligned = aligned

    def count_transfers(self, model) -> None:
        """Raise the counters wherever ZeRO-3 fetches: host partitions at a gather, NVMe partitions at a swap-in."""
        transfers, swapper = self.transfers, self.swapper
        if self.places.offload == "none":
            return
        for parameter in model.parameters():
            parameter.all_gather_coalesced = _counted_gather(parameter.all_gather_coalesced, transfers)
        if swapper is not None:
            swap_in = swapper.swap_in

            def counted_swap_in(params, *args, **kwargs):
                transfers.disk_read_bytes += sum(
                    swapper._io_aligned_numel(p.ds_tensor.ds_numel) * p.element_size() for p in params
                )
                return swap_in(params, *args, **kwargs)

            swapper.swap_in = counted_swap_in


def leave_adapters_alone() -> None:
    """Let DeepSpeed fetch and release only what it has partitioned: adapters add parameters of their own to modules later."""
    from deepspeed.runtime.zero import partitioned_param_coordinator as coordinator

    own = coordinator.get_all_parameters
    if own.__module__ == __name__:  # done before
        return

    def partitioned(module, recurse=False):
        return [(name, parameter) for name, parameter in own(module, recurse) if hasattr(parameter, "ds_id")]

    coordinator.get_all_parameters = partitioned


def _reserve_before_writing(swapper) -> None:
    """Have the disk's space taken before DeepSpeed writes a partition: it does not look at what its writes return, and a later
    read of a short file aborts the process."""
    swap_out = swapper._swap_out

    def reserved_swap_out(params, *args, **kwargs):
        for path, buffer in zip(swapper._get_swap_paths(params), swapper._get_swap_buffers(params)):
            reserve(Path(path), buffer.numel() * buffer.element_size())
        return swap_out(params, *args, **kwargs)

    swapper._swap_out = reserved_swap_out


def _hold_signals_while_counting(swapper) -> None:
    """Have a signal take effect only once DeepSpeed has counted what it handed to libaio, or what it waited for: a count of
    nothing is not waited for, and waiting for nothing aborts the process. Writes are waited for in the same call."""

    def whole(method):
        @functools.wraps(method)
        def call(*args, **kwargs):
            with defer_signals():
                return method(*args, **kwargs)

        return call

    for name in ("_swap_out", "swap_in", "synchronize_writes", "synchronize_reads"):
        setattr(swapper, name, whole(getattr(swapper, name)))


def _counted_gather(gather, transfers: Transfers):
    def counted(params, *args, **kwargs):
        params = list(params)
        for parameter in params:
            # the gather may itself read NVMe first, so what counts is where a partition belongs, not where it is now
            if parameter.ds_tensor.final_location is not None or parameter.ds_tensor.device.type == "cpu":
                transfers.host_to_device_bytes += parameter.ds_tensor.ds_numel * parameter.element_size()
        return gather(params, *args, **kwargs)

    return counted
