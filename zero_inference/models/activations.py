"""What a prefill keeps in memory beside weights, keys and values: found by running the model on the meta device, where tensors have
shapes and no bytes, and adding up those that are alive."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from zero_inference.models.meta_pass import Watching, tensors_in, watch_pass
from zero_inference.models.repeat import NotAlike, storage_of

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
        alive = watch_pass(model, tried, prompt_len, 0, lambda shapes: _Alive())
        if alive is not None:
            return alive.most * dtype.itemsize // tried.itemsize
    return None


class _Alive(Watching):
    """Adds up the storages that operators make, while they are there.

    Attributes:
        now, most: bytes.
        known: by storage the number of it, in the order in which they were made.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: dict[int, int] = {}
        self.made = 0

    def saw(self, function: Any, args: tuple, kwargs: dict, given: set[int], out: Any) -> None:
        """See `Watching`."""
        for tensor in tensors_in(out):
            if storage_of(tensor) not in given:
                self._note(tensor.untyped_storage())

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, -(-storage.nbytes() // ALLOCATION_BYTES) * ALLOCATION_BYTES
        if key in self.known:
            return
        self.known[key] = self.made = self.made + 1
        self.now += nbytes
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._forget, key, nbytes)

    def _forget(self, key: int, nbytes: int) -> None:
        del self.known[key]
        self.now -= nbytes

    def start(self) -> tuple[set[int], int, int, int]:
        """See `OfLayers`."""
        before = set(self.known.values()), self.most, self.now, self.operators_seen
        self.most = self.now
        return before

    def seen(self, start: tuple[set[int], int, int, int], position: int, made: set[int]) -> tuple[int, int]:
        """See `OfLayers`. What the call keeps elsewhere, as in a cache, cannot be repeated."""
        before, most, now, operators = start
        if set(self.known.values()) != before | {self.known.get(storage, -1) for storage in made}:
            raise NotAlike
        peak = self.most - now
        self.most = max(self.most, most)
        return peak, self.operators_seen - operators

    def repeat(self, position: int, seen: tuple[int, int], made: list[torch.Tensor]) -> None:
        """See `OfLayers`."""
        peak, operators = seen
        self.most = max(self.most, self.now + peak)
        self.count(operators)
        for tensor in made:
            self._note(tensor.untyped_storage())
