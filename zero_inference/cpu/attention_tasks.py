"""Attention of decoder layers as tasks of the cores (csrc/cpu/attention_task.h), called as blocks are (zero_inference/cpu/cores.py)."""

from __future__ import annotations

import ctypes

import torch

from zero_inference.cpu.attention import describe
from zero_inference.cpu.cores import Call, Cores
from zero_inference.cpu.matrix import INSTRUCTIONS
from zero_inference.errors import RunError


class AttentionTasks:
    """Attention of layers by the threads of `cores`, which also store the new keys and values. There are no masks."""

    def __init__(self, cores: Cores):
        self.cores = cores
        add = cores.library.zero_inference_cores_add_attention
        add.restype, add.argtypes = ctypes.c_int64, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32]

    def add(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        heads: int,
        scale: float,
        softcap: float = 0.0,
        slopes: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> int:
        """The number of a new task, for keys and values as `attention` takes them; they are kept as long as the threads are there.

        Raises:
            RunError: no memory is left for what the threads need to attend to all positions for one token.
        """
        slopes, sinks = (None if of_heads is None else of_heads.contiguous() for of_heads in (slopes, sinks))
        layer = describe(keys, values, heads, scale, 0, slopes, softcap, sinks)
        self.cores.kept += [tensor for tensor in (keys, values, slopes, sinks) if tensor is not None]
        task = self.cores.library.zero_inference_cores_add_attention(
            self.cores.handle, ctypes.byref(layer), INSTRUCTIONS.index(self.cores.instructions)
        )
        self._reserve(task, 1, keys.shape[0] * keys.shape[3])
        return task

    def _reserve(self, task: int, new: int, positions: int) -> None:
        call = Call(task, new, None, None, (new, positions, 0, 0))
        if self.cores.library.zero_inference_cores_reserve(self.cores.handle, ctypes.byref(call)):
            raise _no_memory()

    def run(self, task: int, packed: torch.Tensor, out: torch.Tensor, new: int, positions: int, window: int) -> None:
        """At once.

        Args:
            packed: queries, new keys and new values, [batch, heads, new, dim] each, one behind the other.
            out: [batch, new, heads, value_dim], contiguous.
            new: tokens; positions: with them; window: as for `attention`.

        Raises:
            RunError: memory is missing.
        """
        call = Call(task, new, packed.data_ptr(), out.data_ptr(), (new, positions, window, 0))
        if self.cores.library.zero_inference_cores_run(self.cores.handle, ctypes.byref(call)):
            raise _no_memory()

    def submit(self, task: int, source: int, target: int, new: int, positions: int, window: int, number: int) -> None:
        """For the moment when the flag of the input has `number`; `source` and `target` are addresses in host memory.

        Raises:
            RunError: memory is missing.
        """
        if new > 1:  # for one there is memory
            self._reserve(task, new, positions)
        call = Call(task, new, source, target, (new, positions, window, 0))
        self.cores.library.zero_inference_cores_submit(self.cores.handle, ctypes.byref(call), number)


def _no_memory() -> RunError:
    return RunError("no host memory is left for attention on the cores: use --cpu-compute off.")
