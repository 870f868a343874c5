"""What a prefill keeps in memory beside weights, keys and values: found by running the model on the meta device, where tensors have
shapes and no bytes, and adding up those that are alive."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from zero_inference.models.meta_pass import Watching, on_meta, run_on_meta, storage_of, tensors_in

ALLOCATION_BYTES = 512  # that CUDA's caching allocator of PyTorch rounds up to


def prefill_peak_bytes(model: Any, dtype: torch.dtype, prompt_len: int) -> int | None:
    """Most bytes of tensors that the prefill of one sequence of `prompt_len` tokens holds at once, without weights, keys and values that
    stay. Those of several sequences are as many times as large.

    A model whose operators know bfloat16 alone on the meta device, as grouped matrix products do, is counted in that. None where it cannot
    run there at all, because it looks at values, or where it loops over positions.

    Args:
        model: without weights, as `skeleton.empty_model` makes it; it is left as it is.
        dtype: of the hidden states.
    """
    for tried in dict.fromkeys((dtype, torch.bfloat16)):
        found = _traced_peak_bytes(model, tried, prompt_len)
        if found is not None:
            return found * dtype.itemsize // tried.itemsize
    return None


def _traced_peak_bytes(model: Any, dtype: torch.dtype, prompt_len: int) -> int | None:
    alive = _Alive()
    return alive.most if run_on_meta(on_meta(model, dtype), prompt_len, 0, alive) else None


class _Alive(Watching):
    """Adds up the storages that operators make, while they are there.

    Attributes:
        now, most: bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: set[int] = set()

    def saw(self, function: Any, args: tuple, kwargs: dict, given: set[int], out: Any) -> None:
        """See `Watching`."""
        for tensor in tensors_in(out):
            if storage_of(tensor) not in given:
                self._note(tensor.untyped_storage())

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, -(-storage.nbytes() // ALLOCATION_BYTES) * ALLOCATION_BYTES
        if key in self.known:
            return
        self.known.add(key)
        self.now += nbytes
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._forget, key, nbytes)

    def _forget(self, key: int, nbytes: int) -> None:
        self.known.discard(key)
        self.now -= nbytes
