"""The experts of a mixture in host memory, of which the cores read those that tokens chose, where they lie."""

from __future__ import annotations

import torch

from zero_inference.cpu.choice import Choice
from zero_inference.cpu.cores import FLAG_BYTES
from zero_inference.cpu.experts import Between, Expert, add_experts
from zero_inference.cpu.matrix import DTYPES
from zero_inference.engines.stream.blocks import Block
from zero_inference.engines.stream.core_blocks import Workers, stored_matrix
from zero_inference.engines.stream.expert_cache import ExpertSlots, multiplies_many
from zero_inference.engines.stream.layout import BlockLayout
from zero_inference.kernels.groups import GroupQuantization
from zero_inference.models.experts import FusedExperts


class ExpertBlock:
    """A block of experts as one task of the cores; arguments as of `CoreBlock`.

    transformers calls the module of experts with hidden states [tokens, hidden] and what the router chose for each token.

    Args:
        on_device: the experts that the device multiplies while the CPU multiplies the others; None for none.
    """

    suits = True  # as a `CoreBlock` has it

    def __init__(
        self,
        block: Block,
        layout: BlockLayout,
        buffer: torch.Tensor,
        workers: Workers,
        dtype: torch.dtype,
        on_device: ExpertSlots | None = None,
    ):
        assert block.experts is not None
        self.calls, self.dtype, self.on_device = workers.calls, dtype, on_device
        use = None if on_device is None else on_device.use
        self.few_rows, self.device_multiplies_many = workers.few_rows, multiplies_many(workers.scheme)
        form = block.experts
        between = Between(form.activation, form.interleaved, form.limit, form.up_offset)
        self.task = add_experts(workers.cores, _experts(form, layout, buffer, workers.scheme), between, dtype, use)
        workers.cores.reserve(self.task, workers.rows, block.experts.chosen)

    def feed_forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """What the module computes: for hidden states [..., hidden], the numbers of the experts of each [tokens, k], and their
        weights [tokens, k]."""
        weights = top_k_weights if top_k_weights.dtype in DTYPES else top_k_weights.float()
        x = hidden_states.to(self.dtype).reshape(-1, hidden_states.shape[-1])
        numbers = top_k_index.to(torch.int64)
        is_prompt = self.on_device is not None and len(numbers) > self.few_rows
        if is_prompt:
            self.on_device.count(numbers)
        if self.on_device is None or (is_prompt and not self.device_multiplies_many):
            (out,) = self.calls(self.task, x, Choice(numbers, weights))
        else:
            out = self._beside_device(self.on_device, x, numbers, weights)
        return out.view(hidden_states.shape).to(hidden_states.dtype)

    def _beside_device(
        self, on_device: ExpertSlots, x: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the sum of all experts: of those in slots and fetched ones by the device, while the CPU multiplies the others."""
        try:
            division = on_device.divide(numbers)
            choice = Choice(division.for_cpu, weights)
            (out,) = self.calls(self.task, x, choice, lambda: on_device.products(x, division, weights))
        except BaseException:
            on_device.forget()
            raise
        return out

    def ends(self) -> None:
        """The block was called to its end; nothing is kept from call to call."""


def choice_bytes(experts: FusedExperts, rows: int) -> int:
    """What a choice of `rows` rows takes behind their hidden states, each part from a cache line on."""
    return rows * experts.chosen * (torch.int64.itemsize + torch.float32.itemsize) + 3 * FLAG_BYTES


def _experts(
    experts: FusedExperts, layout: BlockLayout, buffer: torch.Tensor, scheme: GroupQuantization | None
) -> list[Expert]:
    first, last = (stored_matrix(layout[name], buffer, scheme) for name in (experts.first, experts.last))
    first_bias, last_bias = (
        layout[name].plain.of(buffer) if name else [None] * experts.number
        for name in (experts.first_bias, experts.last_bias)
    )
    inner, hidden = last.columns, last.rows // experts.number
    together = experts.interleaved or not experts.gated  # of one product
    width = (1 + experts.interleaved) * inner
    made = []
    for number in range(experts.number):
        begin, bias = number * (1 + experts.gated) * inner, first_bias[number]
        down, down_bias = last.part(number * hidden, hidden), last_bias[number]
        if together:
            made.append(Expert(first.part(begin, width), None, down, bias, None, down_bias))
            continue
        products = [
            (first.part(begin + half * inner, inner), None if bias is None else bias[half * inner :][:inner])
            for half in range(2)
        ]
        (gate, gate_bias), (up, up_bias) = products[::-1] if experts.gate_is_second else products
        made.append(Expert(gate, up, down, gate_bias, up_bias, down_bias))
    return made
