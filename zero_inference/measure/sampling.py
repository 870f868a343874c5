"""Sample tokens by the Gumbel-max method: the token with the largest sum of logit / temperature and Gumbel noise follows the softmax.

The noise depends on seed, position, row and token id alone. So a token is the same whether its logits are computed in a step or a pass of
several positions, and a draft with similar logits mostly selects the same one (Gumbel coupling).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import LogitsProcessor, TemperatureLogitsWarper, TopPLogitsWarper

from zero_inference.config.run_config import RunConfig
from zero_inference.models.weights import seeded
from zero_inference.utils.ranks import Ranks


class Sampler(LogitsProcessor):
    """Selects tokens, and for `generate` returns scores whose likeliest token is the selected one.

    Args:
        temperature, top_p: of transformers' warpers.
        vocab_size: of the target model; a draft may have fewer ids.
        rows: sequences of all ranks.
        first_row: of this rank.
    """

    def __init__(self, temperature: float, top_p: float, seed: int, vocab_size: int, rows: int, first_row: int = 0):
        self.temperature = float(temperature)
        self.warpers: list[LogitsProcessor] = [TemperatureLogitsWarper(self.temperature)]
        if top_p < 1:
            self.warpers.append(TopPLogitsWarper(top_p))
        self.seed, self.shape, self.first_row = seed, (rows, vocab_size), first_row

    @classmethod
    def of_rank(cls, config: RunConfig, ranks: Ranks, vocab_size: int) -> Sampler | None:
        """Return the sampler of this rank's sequences; None: greedy."""
        if config.temperature is None:
            return None
        first_row = ranks.rank * config.batch_size // ranks.world_size
        return cls(config.temperature, config.top_p, config.seed, vocab_size, config.batch_size, first_row)

    def select(self, logits: torch.Tensor, position: int) -> torch.Tensor:
        """Return the tokens int64 [B, W] at `position` and those after it, for their `logits` [B, W, V]."""
        steps = range(logits.shape[1])  # one after the other: memory as for one token
        return torch.stack([self._with_noise(logits[:, step], position + step).argmax(-1) for step in steps], 1)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return self._with_noise(scores, input_ids.shape[1])

    def noisy(self, logits: torch.Tensor, position: int) -> torch.Tensor:
        """Return logits / temperature + noise, float32 [B, V], of all tokens: also of those that top-p leaves out."""
        return self._with_noise(logits, position, self.warpers[:1])

    def _with_noise(
        self, logits: torch.Tensor, position: int, warpers: Sequence[LogitsProcessor] | None = None
    ) -> torch.Tensor:
        """Return float32 [B, V] for `logits` [B, V] of the token at `position`."""
        scores = logits.float()
        for warper in self.warpers if warpers is None else warpers:
            scores = warper(None, scores)
        rows, vocab_size = scores.shape
        noise = self._noise(position, scores.device)[self.first_row : self.first_row + rows, :vocab_size]
        return scores + noise

    def _noise(self, position: int, device: torch.device) -> torch.Tensor:
        """Return Gumbel noise float32 [rows of all ranks, vocab_size]; on a GPU a value depends on the shape that is drawn, too."""
        generator = seeded(f"{self.seed}:token {position}".encode(), device)
        uniform = torch.rand(self.shape, generator=generator, device=device)  # in [0, 1)
        uniform.clamp_(min=torch.finfo(torch.float32).tiny)  # finite noise: top-p may keep a single token
        return uniform.log_().neg_().log_().neg_()
