"""What is said of a number that does not divide holds: the values named do, and none nearer does."""

from __future__ import annotations

import pytest

from zero_inference.config.checks import batch_advice
from zero_inference.utils.suggestions import nearest_divisor, nearest_multiples


def test_nearest_multiples_are_the_ones_next_to_what_was_asked():
    for parts in range(1, 9):
        for asked in range(1, 40):
            found = nearest_multiples(asked, parts)
            multiples = list(range(parts, asked + parts + 1, parts))
            assert set(found) <= set(multiples) and found
            assert min(abs(value - asked) for value in found) == min(abs(value - asked) for value in multiples)
            assert found == ([asked] if asked % parts == 0 else found) and len(found) <= 2


@pytest.mark.parametrize(
    "asked, whole, packs, found",
    [(48, 320, 1, 64), (100, 4096, 1, 128), (256, 64, 1, 64), (64, 48, 1, 16), (64, 7, 1, None), (64, 40, 16, None)],
)
def test_the_nearest_group_size_divides(asked, whole, packs, found):
    assert nearest_divisor(asked, whole, (256, 128, 64, 32, 16, 8), packs) == found


def test_a_batch_that_cannot_be_split_is_told_what_can():
    assert batch_advice(3, 2, "2 ranks") == (
        "--batch-size 3 does not divide over 2 ranks; use 2 or 4, a multiple of 2, or 1 GPU"
    )
    assert "; use 4, a multiple of 4, or 1 GPU" in batch_advice(1, 4, "--num-gpus 4")
    assert "; use 4 or 8, a multiple of 4, or 3 GPUs" in batch_advice(6, 4, "4 ranks")
