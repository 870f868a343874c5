"""Are the logits finite, and if not, where does it begin? Greedy selection gives ids from NaN too, and they mean nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zero_inference.errors import RunError, UsageError
from zero_inference.models.layers import decoder_layers
from zero_inference.runtime.distributed import Ranks


class FirstLogits:
    """Looks at the raw logits of each forward of the first generation of `model`, all of real tokens; `require_finite` says later
    what it saw. A prefill alone would not do: an expert may be chosen by a later token first.

    The device decides and nobody waits for it there, so the generation that it looks at can be a timed one.
    """

    def __init__(self, model: Any):
        self.model = model
        self.finite: list[torch.Tensor] = []  # one bool a forward
        self.hook = model.register_forward_hook(
            lambda module, args, output: self.finite.append(torch.isfinite(output.logits).all())
        )

    def require_finite(self, dtype: torch.dtype, ranks: Ranks, again: Callable[[int], Any]) -> None:
        """To be called behind each generation by all ranks alike; acts once.

        Args:
            again: generates so many tokens once more, to find the layer that it begins in.

        Raises:
            RunError: logits of any rank hold NaN or infinity; on all ranks, and names the token and the first such decoder layer.
        """
        if not self.finite:
            return
        self.hook.remove()
        finite, self.finite = torch.stack(self.finite).tolist(), []
        token = 1 + int(ranks.minimum(finite.index(False) if False in finite else len(finite)))
        if token > len(finite):
            return
        advice = (
            "float16 overflows above 65504, use --dtype bfloat16 or float32"
            if dtype == torch.float16
            else "check the weights there"
        )
        where = _begins(self.model, ranks, lambda: again(token))
        which = "the prefill" if token == 1 else f"token {token}"
        raise RunError(f"the logits of {which} are not finite (NaN or infinity); {where}: {advice}")


def _begins(model: Any, ranks: Ranks, again: Callable[[], Any]) -> str:
    """Where the first value that is not finite in the last forward of `again` comes from: the earliest place of all ranks."""
    try:
        prefix, layers = decoder_layers(model)
    except UsageError:  # a model without a list of them
        return "its decoder layers are not known"
    finite: dict[int, torch.Tensor] = {}  # by layer; -1 is what goes into the first

    def look(index: int, values: Any) -> None:
        values = values if torch.is_tensor(values) else values[0]
        finite[index] = torch.isfinite(values).all()

    def look_before(layer, args, named) -> None:
        look(-1, args or named["hidden_states"])

    hooks = [model.register_forward_pre_hook(lambda module, args: finite.clear())]
    hooks += [layers[0].register_forward_pre_hook(look_before, with_kwargs=True)]
    hooks += [
        layer.register_forward_hook(lambda layer, args, output, index=index: look(index, output))
        for index, layer in enumerate(layers)
    ]
    try:
        again()
    finally:
        for hook in hooks:
            hook.remove()
    if not finite:
        return "as one CUDA graph it does not show its layers, use --decode-graph off to see where it begins"
    first = int(ranks.minimum(min((index for index, seen in finite.items() if not seen), default=len(layers))))
    if first < 0:
        return "the embeddings are already not finite"
    behind = "it begins after the decoder layers, in the last norm or the head"
    return f"it begins in {prefix}.{first}" if first < len(layers) else behind
