"""Views of blocks are made where a block first lies, and kept."""

from __future__ import annotations

import pytest
import torch
from conftest import VOCAB, plain_ids
from test_stream import BATCH, GEN, PROMPT, generate, load
from test_stream_cpu import prefetcher_of

from zero_inference.engines.stream.layout import BlockViews, TensorSpan, lay_out
from zero_inference.kernels.quantization import GroupQuantization
from zero_inference.models.prompts import random_ids

DEPTH = 7


@pytest.fixture
def viewed(monkeypatch) -> list[TensorSpan]:
    """Every piece that a view was made of."""
    made: list[TensorSpan] = []
    own = TensorSpan.of
    monkeypatch.setattr(TensorSpan, "of", lambda piece, buffer: made.append(piece) or own(piece, buffer))
    return made


@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_views_are_of_one_place_a_block_and_of_others_when_it_comes_there(family, bits, checkpoints, viewed):
    options = {} if bits == 16 else {"quant_bits": 4, "quant_group_size": 32}
    loaded, spec, ranks = load(checkpoints(family), ring_depth=DEPTH, cpu_compute="off", **options)
    blocks = prefetcher_of(loaded).blocks
    layouts = {id(block.layout): block.layout for block in blocks}.values()
    with torch.inference_mode():
        found = generate(loaded, spec, ranks, loops=3).output_ids
    assert 0 < len(viewed) <= DEPTH * sum(len(_views_of(layout)) for layout in layouts), "once a layout and slot"
    assert not any(
        view.is_inference() for block in blocks for views in block.views.found.values() for view in views.plain
    )
    before = len(viewed)
    again = generate(loaded, spec, ranks, loops=1).output_ids
    loaded.close()
    assert len(viewed) == before and torch.equal(found, again)
    if bits == 16:
        assert torch.equal(found, plain_ids(checkpoints(family), random_ids(0, BATCH, PROMPT, VOCAB), GEN))


def _views_of(layout) -> list[TensorSpan]:
    return [piece for each in layout.parameters for piece in (each.plain, *(each.packed or ()))]


def test_a_slot_stands_for_those_that_are_aligned_alike():
    scheme = GroupQuantization(4, 32)
    layout = lay_out([("weight", torch.empty(64, 64, device="meta"))], scheme, ranks=1)
    slots = [torch.zeros(layout.nbytes + 8, dtype=torch.uint8)[shift:][: layout.nbytes] for shift in (0, 0, 8, 0, 8)]
    views = BlockViews(layout, slots, torch.empty(layout.workspace_bytes, dtype=torch.uint8))
    assert len(views.of_each_alignment()) == 2
    codes, *_, values = views[2].packed["weight"]
    assert codes.data_ptr() - slots[2].data_ptr() == layout["weight"].packed[0].offset
    assert values.data_ptr() == views[4].plain[0].data_ptr() and views[2] is views[2]
