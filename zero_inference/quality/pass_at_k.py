"""pass@k: the chance that one of k samples of a problem is right, from n samples of which c were."""

from __future__ import annotations

from math import comb


def pass_at_k(n: int, c: int, k: int) -> float:
    """The unbiased estimate 1 - C(n - c, k) / C(n, k) for one problem, computed in whole numbers.

    Source: Chen et al., Evaluating Large Language Models Trained on Code (2021), equation 1.

    Args:
        n: samples drawn.
        c: samples that passed, 0 to n.
        k: samples of which one has to pass, 1 to n.

    Raises:
        ValueError: c or k out of its range.
    """
    if not 0 <= c <= n:
        raise ValueError(f"c = {c} samples passed of n = {n}: it has to be 0 to n")
    if not 1 <= k <= n:
        raise ValueError(f"k = {k} with n = {n} samples: k has to be 1 to n; draw more samples")
    return 1.0 - comb(n - c, k) / comb(n, k)
