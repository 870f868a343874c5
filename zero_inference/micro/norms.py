"""This package's norm kernels in a block of `zero-inference micro layer`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from zero_inference.utils.progress import current

if TYPE_CHECKING:
    import torch

    from zero_inference.micro.blocks import Block

TRIED_COLUMNS = 4096  # hidden size of the norm kernels' trial


def norm_patch(
    asked: str,
    device: torch.device,
    dtype: torch.dtype,
    families: Sequence[str],
    prepare: Callable[..., str | None] | None = None,
) -> Callable[[Block], int] | None:
    """What puts our norm kernels into a block and says on stderr how many norms it replaced, or why none; None to try nowhere.

    With `auto` the kernels are compiled and tried when the first block needs them, after its row without them.

    Args:
        asked: --norm-kernels.
        families: transformers' model_type of each block.
        prepare: `norms.choice.prepare_norm_kernels` where not given; another where no kernel can run, and the operators' reference
            is to be measured.

    Raises:
        UsageError: `cuda` was asked for, and no block's norms have kernels, or the kernels are not there or fail on this device.
    """
    from zero_inference.norms.choice import apply_norm_kernels, prepare_norm_kernels, refuse_norm_kernels
    from zero_inference.norms.patch import why_not_family

    if asked == "off" or (asked == "auto" and device.type != "cuda"):
        return None

    @functools.cache
    def why_not(family: str) -> str | None:
        if reason := why_not_family(family):
            return reason
        return (prepare or prepare_norm_kernels)(asked, family, device, dtype, TRIED_COLUMNS, current().say)

    if asked == "cuda":
        known = [family for family in families if why_not_family(family) is None]
        refuse_norm_kernels(asked, (known or families)[0])
        why_not(known[0])

    def patch(block: Block) -> int:
        reason = why_not(block.family)
        facts = apply_norm_kernels("auto" if reason else asked, reason, block.module, lambda line: None, block.family)
        count = facts["norm_modules_patched"]
        current().say(
            f"{block.name}: "
            + (
                f"{count} norms use this package's kernels"
                if count
                else f"norms use transformers' implementation: {facts['norm_kernels_unused_because']}"
            )
        )
        return count

    return patch
