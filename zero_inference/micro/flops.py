"""Floating-point operations of a transformer block, from its dimensions: a multiplication and an addition count two.

The classical block (Vaswani et al. 2017: one head size for queries, keys and values, an inner layer of 4 h) needs
`24 b s h^2 + 4 b h s^2` for b sequences of s tokens and hidden size h; the sums below are the same for any widths. Products alone
count; norms, softmax, biases and activations do not. `torch.utils.flop_counter` counts the same, and the tests hold them
against each other. Causal attention is counted in full, as there and in the contract: a kernel that skips the half above the
diagonal (flash attention) does less, and `BlockShape.skippable` says how much less that could be.
"""

from __future__ import annotations

from dataclasses import dataclass

# Of a forward pass; the backward pass makes two products, for inputs and for weights, of each product of the forward pass.
FORWARD_AND_BACKWARD = 3


def matmul(n: int) -> int:
    """[n, n] x [n, n]."""
    return 2 * n**3


@dataclass(frozen=True)
class BlockShape:
    """Widths of a block.

    Attributes:
        hidden: h, of the input and the output.
        query: all query heads together, `heads * head_dim`.
        key: all key heads together; less than `query` with grouped queries. Values are as wide.
        inner: of the feed-forward part.
        matrices: of the feed-forward part: 2, or 3 with a gate.
        causal: whether a token sees only those before it.
    """

    hidden: int
    query: int
    key: int
    inner: int
    matrices: int = 2
    causal: bool = False

    def dense(self, b: int, s: int) -> int:
        """One matrix of the feed-forward part: `2 b s h inner`, which is `8 b s h^2` with inner = 4 h."""
        return 2 * b * s * self.hidden * self.inner

    def feed_forward(self, b: int, s: int) -> int:
        """All of its matrices: `16 b s h^2` in the classical block."""
        return self.matrices * self.dense(b, s)

    def scores(self, b: int, s: int) -> int:
        """Queries times keys, and the weights times values: `4 b query s^2`."""
        return 4 * b * self.query * s**2

    def attention(self, b: int, s: int) -> int:
        """The four projections and the scores: `8 b s h^2 + 4 b h s^2` in the classical block."""
        return 2 * b * s * self.hidden * (2 * self.query + 2 * self.key) + self.scores(b, s)

    def forward(self, b: int, s: int) -> int:
        """The block: `24 b s h^2 + 4 b h s^2` in the classical one."""
        return self.attention(b, s) + self.feed_forward(b, s)

    def skippable(self, b: int, s: int) -> float:
        """Share of `forward` that a causal kernel may leave out: scores of `s (s - 1) / 2` pairs of `s^2`; 0 if not causal."""
        return self.scores(b, s) * (s - 1) / (2 * s) / self.forward(b, s) if self.causal else 0.0
