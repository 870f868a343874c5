"""Linear modules with one input are one product with the codes of all, where these follow each other in memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_cases import PUBLISHED, PackedWeights, published
from test_stream import BATCH, ids_of

from zero_inference.engines.stream import products as stream_products
from zero_inference.engines.stream.layout import BlockViews, lay_out
from zero_inference.engines.stream.products import SharedInput, _join_adjacent, _join_weights
from zero_inference.kernels.quantization import dequantize


@pytest.fixture
def products(monkeypatch):
    """Of short passes, by how many modules; on a CPU by the operator's way without a kernel."""
    made: list[int] = []
    own = stream_products.Linears._joined_weights

    def packed(self, names):
        found = own(self, names)
        made.append(len(names) if found is not None else 0)
        return found

    monkeypatch.setattr(stream_products.Linears, "_joined_weights", packed)
    if not torch.cuda.is_available():
        monkeypatch.setattr(stream_products, "load_extension", lambda: True)
        monkeypatch.setattr(stream_products, "_can_fuse", lambda *args: True)
    return made


@pytest.mark.parametrize(
    ("family", "of_layer"), [("llama", {3, 1, 2}), ("qwen3", {3, 1, 2}), ("opt", {3, 1}), ("gpt_neox", {1})]
)
@pytest.mark.parametrize("gpu_memory", [0, 1])
def test_ids_are_those_of_products_one_by_one(family, of_layer, gpu_memory, checkpoints, products, monkeypatch):
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    placed = {"quant_bits": 4, "quant_group_size": 32, "gpu_memory": gpu_memory, "dtype": dtype, "cpu_compute": "off"}
    found = ids_of(checkpoints(family), **placed)
    assert set(products) == of_layer
    monkeypatch.setattr(SharedInput, "observe", lambda self, name, x: None)  # then nothing is known to go together
    products.clear()
    one_by_one = ids_of(checkpoints(family), **placed)
    assert set(products) == {1}
    if torch.cuda.is_available():  # its sums have an order that depends on the rows
        assert (found == one_by_one).float().mean() > 0.5
    else:
        assert torch.equal(found, one_by_one)


def test_tensors_join_adjacent_are_one():
    buffer = torch.arange(24, dtype=torch.int32)
    parts = [buffer[:8], buffer[8:12], buffer[12:]]
    assert torch.equal(_join_adjacent(parts), buffer)
    assert _join_adjacent(parts[::2]) is None and _join_adjacent(parts[::-1]) is None
    assert _join_adjacent(parts[:1]) is parts[0]


@pytest.mark.parametrize("name", PUBLISHED)
def test_adjacent_weights_of_one_format_are_one(name):
    """As a layout has them: the codes of all, then the scales of all, and so on."""
    form, rows, dtype = published(name, torch.bfloat16), (128, 256, 384), torch.bfloat16
    parts = {f"{count}.weight": PackedWeights(1, count, 512, form, dtype, seed=count) for count in rows}
    layout = lay_out([(each, part.plain[0]) for each, part in parts.items()], dict.fromkeys(parts, form))
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
    for each, part in parts.items():
        for span, tensor in zip(layout[each].pieces, part.weight.tensors.values()):
            span.of(buffer).copy_(tensor[0])
    assert layout.stored_bytes == sum(form.stored_bytes((count, 512)) for count in rows)
    workspace = torch.zeros(layout.workspace_bytes, dtype=torch.uint8)
    weights = [packed.weight for packed in BlockViews(layout, [buffer], workspace)[0].packed.values()]
    out = torch.empty(sum(rows), 512, dtype=dtype)
    dequantize(_join_weights(weights, rows), out)
    assert torch.equal(out, torch.cat([part.plain[0] for part in parts.values()]))
    assert _join_weights(weights[::2], rows[::2]) is None
    other = replace(weights[1], format=replace(form, divides=not form.divides))
    assert _join_weights([weights[0], other], rows[:2]) is None


def test_modules_that_were_called_with_one_tensor_share_a_product():
    asked = []

    class Sums(SharedInput):
        def alike(self, one, other):
            return one != "other size"

        def products(self, names, x):
            asked.append(names)
            return [x + len(name) for name in names]

    same = Sums()
    x, y = torch.zeros(BATCH), torch.ones(BATCH)
    for name, tensor in (("a", x), ("bb", x), ("other size", x), ("ccc", y), ("d", x)):
        same.observe(name, tensor)
    assert {name: same.together[name] for name in ("a", "other size", "d")} == {
        "a": ("a", "bb"),
        "other size": ("other size",),
        "d": ("d",),
    }
    assert torch.equal(same.product("bb", x), x + 2) and torch.equal(same.product("a", x), x + 1)
    assert asked == [("a", "bb")], "one product for both"
    same.product("a", y)
    assert len(asked) == 2 and same.input is y
    same.observe("not called in the first pass", y)
    assert same.together["not called in the first pass"] == ("not called in the first pass",)
    same.end_block()
    assert same.input is None and not same.ready
