"""Ranks that share a model's layers have to call it equally often, and their shares of questions do not see to that.

Which questions share a forward, and how many tokens a program takes, differs from rank to rank. So each forward begins with a
word to the others, and a rank whose work is done goes along, with one token, for as long as another has any.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from zero_inference.utils.ranks import Ranks


@contextmanager
def in_step(model, device: torch.device, ranks: Ranks) -> Iterator[None]:
    """Within it ranks call `model` as often as each likes; it ends when all are done.

    Leaving by an exception does not wait for the others.
    """
    if ranks.world_size == 1:
        yield
        return
    word = model.register_forward_pre_hook(lambda module, args: _anybody_works(ranks, True), prepend=True)
    try:
        yield
    finally:
        word.remove()
    token = torch.zeros(1, 1, dtype=torch.long, device=device)
    while _anybody_works(ranks, False):
        with torch.no_grad():
            model(token, use_cache=False)


def _anybody_works(ranks: Ranks, here: bool) -> bool | None:
    anybody = ranks.maximum([float(here)])[0] > 0
    return None if here else anybody  # what a pre-hook returns would replace the inputs
