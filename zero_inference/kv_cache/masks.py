"""Masks of a model, for attention on the host's cores."""

from __future__ import annotations

import torch

SEEN = 4  # a model has one or two kinds of masks in a pass


class Masks:
    """Masks of a model on the host, each brought there once a pass."""

    def __init__(self) -> None:
        self.seen: list[tuple[torch.Tensor, int, torch.Tensor | None]] = []

    def on_host(self, mask: torch.Tensor | None, positions: int) -> tuple[int, torch.Tensor | None]:
        """A window, and the mask [batch or 1, heads or 1, new, positions] on the CPU where it says more; else None.

        Args:
            mask: booleans that are true where a token sees, or what is added to its logits; None sees all.
        """
        if mask is None:
            return 0, None
        for known, window, rest in self.seen:
            if known is mask:
                return window, rest
        host = mask[..., :positions].cpu()
        window = window_of(host)
        rest = None if window else host
        self.seen = [*self.seen[1 - SEEN :], (mask, window, rest)]
        return window, rest


def window_of(mask: torch.Tensor) -> int:
    """How many of the last positions one token sees, if that is all that `mask` [batch, heads, new, positions] says; else 0."""
    if mask.shape[2] != 1:
        return 0
    seen = mask.flatten(0, 2)
    if mask.dtype != torch.bool:
        if not ((seen == 0) | (seen <= torch.finfo(mask.dtype).min)).all():
            return 0
        seen = seen == 0
    count = int(seen[0].sum())
    last = torch.arange(mask.shape[3]) >= mask.shape[3] - count
    return count if torch.equal(seen, last.expand_as(seen)) else 0
