"""Calls of a model that are decode steps like any other, and what changes from one to the next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from zero_inference.kv_cache.device import DeviceKVCache

# Of a call of the model: what the graph has in tensors, and what has to be as it is in a plain generation.
IN_TENSORS = {"input_ids", "position_ids", "cache_position", "attention_mask", "past_key_values"}
USUAL = {"use_cache": (None, True), "return_dict": (None, True), "logits_to_keep": (0, 1)}


@dataclass
class StepInputs:
    """What changes from step to step, in memory that stays: ids and positions int64 [batch, 1], place int64 [1], mask
    [batch, 1, 1, positions] in the model's dtype."""

    ids: torch.Tensor
    positions: torch.Tensor
    place: torch.Tensor
    mask: torch.Tensor

    @classmethod
    def like(cls, ids: torch.Tensor, length: int, dtype: torch.dtype) -> StepInputs:
        """Empty, for `ids` [batch, 1] and a cache of `length` positions."""
        mask = torch.empty(ids.shape[0], 1, 1, length, dtype=dtype, device=ids.device)
        return cls(torch.empty_like(ids), torch.empty_like(ids), ids.new_empty(1), mask)

    def instead_of(self, call: dict[str, Any]) -> dict[str, Any]:
        """`call` with these tensors in place of its own."""
        known = {"cache_position": self.place} if call.get("cache_position") is not None else {}
        return call | known | {"input_ids": self.ids, "position_ids": self.positions, "attention_mask": self.mask}

    def fill(self, call: dict[str, Any]) -> None:
        """With those of `call`, whose cache has not got its keys and values yet."""
        length = call["past_key_values"].get_seq_length()
        self.ids.copy_(call["input_ids"])
        self.positions.copy_(call["position_ids"])
        self.place.fill_(length)
        self.mask.fill_(torch.finfo(self.mask.dtype).min)
        seen, given = self.mask[:, 0, 0, : length + 1], call.get("attention_mask")
        if given is None:
            seen.zero_()
        else:
            seen.masked_fill_(given.bool(), 0)


def visible_positions(call: dict[str, Any], dtype: torch.dtype) -> torch.Tensor:
    """A mask of `dtype`, [batch, 1, 1, positions], to be added, over the positions that a decode step sees: what transformers makes of
    its attention mask, or what none says."""
    ids, length = call["input_ids"], call["past_key_values"].get_seq_length() + 1
    mask = torch.zeros(ids.shape[0], 1, 1, length, dtype=dtype, device=ids.device)
    given = call.get("attention_mask")
    return mask if given is None else mask.masked_fill_(~given.bool()[:, None, None, :], torch.finfo(dtype).min)


def is_decode_step(call: dict[str, Any]) -> bool:
    """Whether a call of a model has one more token for each sequence of a `DeviceKVCache`, and asks for nothing but logits."""
    ids, cache, positions = call.get("input_ids"), call.get("past_key_values"), call.get("position_ids")
    if not (torch.is_tensor(ids) and ids.dim() == 2 and ids.shape[1] == 1 and isinstance(cache, DeviceKVCache)):
        return False
    if (
        not torch.is_tensor(positions)
        or positions.shape != ids.shape
        or not 0 < cache.get_seq_length() < cache.max_length
    ):
        return False
    place, mask = call.get("cache_position"), call.get("attention_mask")
    if place is not None and (not torch.is_tensor(place) or place.shape != (1,)):
        return False
    if mask is not None and (not torch.is_tensor(mask) or mask.shape != (ids.shape[0], cache.get_seq_length() + 1)):
        return False
    return all(_is_usual(name, value) for name, value in call.items() if name not in IN_TENSORS)


def _is_usual(name: str, value: Any) -> bool:
    return not torch.is_tensor(value) and value in USUAL.get(name, (None, False))
