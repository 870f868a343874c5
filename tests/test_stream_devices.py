"""The stream engine over several devices: the ids of one device, a ring for each, how layers are divided over them.

Without GPUs the CPU stands in for each device.
"""

from __future__ import annotations

import gc
import random
import weakref

import pytest
import torch
from conftest import FAMILIES, plain_ids
from test_machine import H200, MACHINE, planned, replace
from test_stream import BATCH, GEN, PROMPT, VOCAB, generate, layers_of, load
from test_stream_cpu import installed
from transformers import AutoConfig, AutoModelForCausalLM

from zero_inference.config.run_config import RunConfig
from zero_inference.engines.stream import devices
from zero_inference.engines.stream.blocks import why_one_device
from zero_inference.engines.stream.devices import LayerDevices, count_rows, replace_tensors
from zero_inference.engines.stream.placement import assign_layers, plan_placement
from zero_inference.engines.stream.ring import BlockTimes, simulate_passes
from zero_inference.errors import DoesNotFit
from zero_inference.hardware.machine import Machine
from zero_inference.kv_cache.device import DeviceKVCache
from zero_inference.models.layers import decoder_layers
from zero_inference.models.prompts import random_ids
from zero_inference.models.spec import resolve_model
from zero_inference.planning import plan as plan_module
from zero_inference.planning.make_plan import make_plan
from zero_inference.planning.plan import build_job
from zero_inference.utils.ranks import detect_ranks

DEVICES = max(2, min(3, torch.cuda.device_count())) if torch.cuda.is_available() else 3
needs_gpus = pytest.mark.skipif(torch.cuda.device_count() == 1, reason="needs two GPUs, or none")
GIB = 1 << 30


@needs_gpus
@pytest.mark.parametrize("family", sorted(FAMILIES) if torch.cuda.is_available() else ["opt"])
def test_ids_are_those_of_transformers(family, checkpoints):
    folder = checkpoints(family)
    loaded, spec, ranks = load(folder, devices=DEVICES, cpu_compute="0.5")
    placement = installed(loaded).placement
    found = generate(loaded, spec, ranks, loops=2)
    loaded.close()
    assert len(loaded.devices) == DEVICES and set(placement.layer_devices) == set(range(min(DEVICES, placement.layers)))
    assert torch.equal(found.output_ids, plain_ids(folder, random_ids(0, BATCH, PROMPT, VOCAB), GEN))


@needs_gpus
@pytest.mark.parametrize(
    "options",
    [
        {"decode_graph": "on", "cpu_compute": "off", "gen_len": 20},
        {"decode_graph": "on", "cpu_compute": "0.5", "gen_len": 20},
        {"kv_offload": True, "cpu_compute": "off"},
        {"kv_offload": True, "cpu_compute": "0.5"},
        {"quant_bits": 4, "quant_group_size": 32, "cpu_compute": "0.4"},
        {"gpu_memory": 0.0003},
        {"gpu_memory": 1.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_ids_are_those_of_one_device(family, options, checkpoints):
    one, several = (load(checkpoints(family), devices=count, **options) for count in (1, DEVICES))
    length = options.get("gen_len", GEN)
    ids = [generate(*loaded, gen_len=length, loops=2).output_ids for loaded in (one, several)]
    if "decode_graph" in options:
        assert several[0].facts["stream"]["decode_graph"].unused_because is None
    for loaded, *_ in (one, several):
        loaded.close()
    assert torch.equal(*ids)


@needs_gpus
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_resident_layers_on_several_devices_give_the_same_ids(family, checkpoints):
    loaded, spec, ranks = load(checkpoints(family), devices=2, engine="resident")
    found = generate(loaded, spec, ranks)
    loaded.close()
    assert torch.equal(found.output_ids, plain_ids(checkpoints(family), random_ids(0, BATCH, PROMPT, VOCAB), GEN))
    if loaded.device.type == "cuda":
        assert len({parameter.device for parameter in loaded.model.parameters()}) == 2


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_thousand_steps_on_two_gpus_give_the_ids_of_one(checkpoints):
    options = {"decode_graph": "on", "cpu_compute": "0.5", "gen_len": 1001}
    one, two = (load(checkpoints("llama"), devices=count, **options) for count in (1, 2))
    ids = [generate(*loaded, gen_len=1001, loops=1).output_ids for loaded in (one, two)]
    for loaded, *_ in (one, two):
        loaded.close()
    assert torch.equal(*ids)


@needs_gpus
def test_each_device_fetches_its_own_layers_in_their_order(checkpoints):
    loaded, spec, ranks = load(checkpoints("llama"), devices=2, cpu_compute="off", ring_depth=2)
    prefetcher = installed(loaded)
    generate(loaded, spec, ranks, loops=2)
    copies = [[copy.block for copy in device.copies if copy.pass_index > 0] for device in loaded.timeline.devices]
    placement, by_device = prefetcher.placement, loaded.timeline.by_device()
    together = loaded.timeline.link_use()
    loaded.close()
    for device, blocks in enumerate(copies):
        own = placement.on(device, placement.streamed)
        first = own.index(blocks[0])
        assert own and blocks == [own[(first + step) % len(own)] for step in range(len(blocks))]
    assert together.copied_bytes == sum(use.copied_bytes for use in by_device)
    assert together.busy_s == pytest.approx(sum(use.busy_s for use in by_device))


def test_layers_take_turns_in_proportion_to_what_devices_take():
    eight = [GIB] * 8
    assert assign_layers(eight, [0, 0]) == (0, 1) * 4
    assert assign_layers(eight, [0, 0, 0]) == (0, 1, 2, 0, 1, 2, 0, 1)
    assert assign_layers(eight, [9 * GIB, 9 * GIB]) == (0,) * 4 + (1,) * 4, "all are resident: few changes of device"
    assert assign_layers(eight, [None, None]) == (0,) * 4 + (1,) * 4
    assert assign_layers(eight, [6 * GIB, 2 * GIB]) == (0,) * 6 + (1,) * 2
    assert assign_layers([3, 3, 2, 2], [5, 5]) == (0, 1, 0, 1), "no contiguous layers fit"
    assert assign_layers([4, 2, 2, 2], [4, 6]) == (0, 1, 1, 1)
    assert assign_layers(eight, [9 * GIB, 9 * GIB], alternate=True) == (0, 1) * 4
    assert assign_layers(eight, [6 * GIB, 2 * GIB], alternate=True) == (0, 0, 1, 0) * 2
    # 2 and 0 of 8 layers are resident, and each link brings 3
    uneven = assign_layers(eight, [2 * GIB, 0])
    assert (uneven.count(0), uneven.count(1)) == (5, 3) and uneven[:2] in ((0, 1), (0, 0))
    slow = assign_layers([GIB] * 40, [0, 0], [0.75, 0.25])
    assert (slow.count(0), slow.count(1)) == (30, 10), "in proportion to the rates of the links"
    assert all(1 in slow[first : first + 5] for first in range(0, 40, 5)), "and by turns"
    draw = random.Random(0)
    for _ in range(200):
        sizes = [draw.randint(1, 3) * GIB for _ in range(draw.randint(4, 40))]
        capacities = [draw.choice([0, draw.randint(0, 30) * GIB]) for _ in range(draw.randint(2, 4))]
        of_layers = assign_layers(sizes, capacities)
        taken = [
            sum(size for size, device in zip(sizes, of_layers) if device == each) for each in range(len(capacities))
        ]
        resident = [min(sum(sizes), capacity) for capacity in capacities]
        missing = sum(sizes) - sum(resident)
        if missing <= 0:
            continue
        for own, held in zip(taken, resident):  # no link has to bring more than its part, and one layer
            assert own - held <= missing / len(capacities) + 3 * GIB


def test_each_device_is_filled_to_its_own_budget():
    of_layers = assign_layers([GIB] * 16, [6 * GIB, 2 * GIB])
    plan = plan_placement(layers_of(*[GIB] * 16), GIB, [9 * GIB, 5 * GIB], None, 3, of_layers)
    assert [of_layers.count(device) for device in (0, 1)] == [10, 6], "each link brings 4"
    assert [len(plan.on(device, plan.resident)) for device in (0, 1)] == [6, 2]
    assert plan.device_bytes_on(0) == (1 + 6 + 3) * GIB, "with what is in no block"
    assert plan.device_bytes_on(1) == (2 + 3) * GIB
    given = plan_placement(layers_of(*[GIB] * 12), 0, [None, None], 1, 2, (0, 1) * 6)
    assert [len(given.on(device, given.resident)) for device in (0, 1)] == [1, 1] and given.reserved_bytes == GIB


def test_the_cpu_takes_an_equal_share_of_each_link():
    blocks = layers_of(*[GIB] * 16)
    plan = plan_placement(blocks, 0, [None, None], 0, 2, (0, 1) * 8)
    able = {"computable": property(lambda self: self.in_host_memory)}
    plan.__class__ = type("AllComputable", (type(plan),), able)
    for share in (0.25, 0.5, 0.75):
        computed = plan.with_even_cpu_share(share).cpu_computed
        assert [len(plan.on(device, computed)) for device in (0, 1)] == [8 * share] * 2


def test_a_plan_divides_layers_by_the_rates_of_the_links():
    """In a described machine whose second GPU is in a slot of 4 lanes, with and without the CPU."""
    gpus = tuple(replace(H200, link_gb_per_s=rate) for rate in (50.0, 12.5))
    machine = Machine(replace(MACHINE, gpus=gpus, all_links_gb_per_s=62.5))
    options = "--model llama-2-13b --dummy --engine stream --quant-bits 4 --gpu-memory 0 --num-gpus 2"
    for cpu in ("off", "auto"):
        found = planned(f"{options} --cpu-compute {cpu}", machine).engine_plan
        assert [found.layer_devices.count(device) for device in (0, 1)] == [32, 8]
        fast, slow = (found.fetched_bytes_on(device) for device in (0, 1))
        assert 3 < fast / slow < 5, "each link has as much to copy as it can"


@needs_gpus
def test_a_ring_may_wait_for_the_end_of_a_layer(checkpoints):
    """Blocks are requested for the slots of a layer when it has ended on its device; ids stay the same."""
    loaded, spec, ranks = load(checkpoints("llama"), devices=2, cpu_compute="0.3", ring_depth=4)
    prefetcher, seen = installed(loaded), []
    for ring in prefetcher.rings.values():
        ring.refills_after_layers = True

        def refill(ring=ring, own=ring.refill):
            seen.append(len(ring.released))
            own()

        ring.refill = refill
    found = generate(loaded, spec, ranks, loops=2)
    waiting = [ring.released for ring in prefetcher.rings.values() if ring.released]
    loaded.close()
    assert torch.equal(found.output_ids, plain_ids(checkpoints("llama"), random_ids(0, BATCH, PROMPT, VOCAB), GEN))
    assert max(seen) > 1, "several blocks of a layer at once"
    assert not waiting, "the first device computes the last of three layers, too, and begins the next pass"


@needs_gpus
def test_a_block_that_a_layer_calls_twice_is_fetched_again(checkpoints):
    """Also where all slots wait for the end of the layer."""
    loaded, *_ = load(checkpoints("llama"), devices=2, cpu_compute="0.3", ring_depth=2)
    (ring, *_), seen = installed(loaded).rings.values(), []
    ring.refills_after_layers = True
    blocks = ring.pass_order[:2]
    ring.begin_pass(blocks, blocks)
    for block in (*blocks, blocks[0]):
        found = ring.buffer_in(block, ring.acquire(block))
        seen.append(torch.equal(found.cpu(), ring.store.buffers[block]))
        ring.release(block)
    loaded.close()
    assert seen == [True] * 3


def test_rows_of_a_sequence_in_the_inputs_of_a_layer():
    """5 sequences of 7 tokens, 4 heads."""
    forms = {
        1: [(5, 7, 64), (5, 7), (5, 1, 7, 7), (5, 4, 7, 9), (5, 9)],
        0: [(7,), (1, 7), (1, 7, 16), (7, 16), (7, 1, 16), (1, 1, 7, 7), (4, 1, 7)],
        4: [(20, 1, 7), (20, 1, 9)],
        None: [(3, 5, 7, 16), (5, 1, 7), (4, 16), (5, 3), (10, 1, 7)],
    }
    for count, shapes in forms.items():
        assert [count_rows(torch.empty(shape), 5, 7, 4) for shape in shapes] == [count] * len(shapes)
    assert count_rows(torch.empty(4, 1, 7), 4, 7, 4) is None, "of sequences or of heads"
    assert count_rows(torch.empty(20, 1, 20), 5, 20, 4) is None, "of tokens, or of the heads of all sequences"


def test_micro_batches_are_long_enough_for_the_launches_of_a_layer():
    options = "--dummy --engine stream --quant-bits 4 --gpu-memory 0 --num-gpus 2 --cpu-compute off --batch-size 8"
    machine = Machine(replace(MACHINE, gpus=(H200, H200)))
    found = {}
    for model, length in (("llama-2-13b", 2048), ("llama-2-13b", 256), ("qwen3-30b-a3b", 2048)):
        found[model, length] = planned(f"--model {model} {options} --prompt-len {length}", machine).engine_plan
    assert [each.prefill_micro_batches for each in found.values()] == [2, 1, 1]
    of_llama, _, of_qwen = (each.job.layer_parameters for each in found.values())
    assert of_llama == pytest.approx(4 * 5120**2 + 3 * 5120 * 13824, rel=0.01)
    attention, experts = 2 * 2048 * (4096 + 512), 8 * 3 * 2048 * 768
    assert of_qwen == pytest.approx(attention + experts, rel=0.01)


def test_links_copy_at_the_same_time():
    one = [BlockTimes(3.0, 1.0)] * 8
    two = [BlockTimes(3.0, 1.0, index % 2) for index in range(8)]
    assert simulate_passes(one, [3], False) == pytest.approx(24.0), "one link is never idle"
    assert simulate_passes(two, [3, 3], False) == pytest.approx(12.0), "nor are two"
    assert simulate_passes([BlockTimes(1.0, 3.0, index % 2) for index in range(8)], [2, 2], True) == pytest.approx(24.0)
    halves = [BlockTimes(3.0, 1.0, index // 4) for index in range(8)]
    assert simulate_passes(halves, [2, 2], False) > 13.0, "consecutive layers of a device come too late for two slots"


def test_tensors_are_replaced_wherever_a_layer_takes_them():
    one, two = torch.zeros(1), torch.ones(1)
    cache = object()
    values = ((one, [two, None]), {"mask": one, "rotary": (two, two), "cache": cache, "flag": True})
    args, kwargs = replace_tensors(values, lambda tensor: tensor + 5)
    assert args[0].item() == 5 and args[1][0].item() == 6 and args[1][1] is None
    assert kwargs["mask"].item() == 5 and isinstance(kwargs["rotary"], tuple) and kwargs["cache"] is cache


@needs_gpus
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", ["llama", "mixtral", "bloom"])
@pytest.mark.parametrize("options", [{"cpu_compute": "off"}, {"cpu_compute": "0.5"}, {"gpu_memory": 1.0}], ids=str)
def test_a_long_prompt_is_divided_into_micro_batches(family, options, padded, checkpoints, monkeypatch):
    """Logits and keys of a prompt of 5 sequences, and the steps after it, are those of the whole batch."""
    monkeypatch.setattr(devices, "MIN_MICRO_BATCH_FLOPS", 1.0)
    ids, mask = random_ids(0, 5, PROMPT, VOCAB), torch.ones(5, PROMPT, dtype=torch.int64)
    mask[1, : 4 * padded] = mask[4, : 2 * padded] = 0
    found = []
    for count in (1, 2):
        loaded, spec, _ = load(checkpoints(family), devices=count, ring_depth=5, batch_size=5, **options)
        layers, parts = installed(loaded).layers, []
        decoder_layers(loaded.model)[1][1].register_forward_hook(lambda *_: parts.append(len(layers.micro_batches)))
        cache = DeviceKVCache(spec.config, PROMPT + GEN)
        inputs = {"attention_mask": mask.to(loaded.device), "max_new_tokens": GEN, "do_sample": False}
        for _ in range(2):
            cache.reset()
            ids_now = ids.to(loaded.device)
            logits = loaded.model.generate(ids_now, past_key_values=cache, pad_token_id=0, **inputs)
        # prompts of two generations; steps are not divided, and call no hooks once they are a graph
        assert parts[:2] == [count, 1] and sum(each > 1 for each in parts) == (2 if count > 1 else 0)
        found.append((logits.cpu(), [key.cpu() for key in cache.at(PROMPT - 1)]))
        loaded.close()
    (one, keys), (two, same_keys) = found
    assert torch.equal(one, two)
    for key, same in zip(keys, same_keys, strict=True):
        torch.testing.assert_close(key, same, atol=1e-5, rtol=1e-4)


@needs_gpus
@pytest.mark.parametrize("family", ["llama", "mixtral", "bloom"])
def test_resident_layers_alternate_for_a_long_prompt(family, checkpoints, monkeypatch):
    monkeypatch.setattr(devices, "MIN_MICRO_BATCH_FLOPS", 1.0)
    loaded, spec, ranks = load(checkpoints(family), devices=2, engine="resident", batch_size=BATCH)
    layers, parts = installed(loaded, LayerDevices), []
    assert list(layers.layer_devices) == [0, 1, 0]
    decoder_layers(loaded.model)[1][1].register_forward_hook(lambda *_: parts.append(len(layers.micro_batches)))
    found = generate(loaded, spec, ranks)
    loaded.close()
    assert max(parts) == 2 and parts[-1] == 1, "steps are not divided"
    assert torch.equal(found.output_ids, plain_ids(checkpoints(family), random_ids(0, BATCH, PROMPT, VOCAB), GEN))


@pytest.mark.parametrize(
    ("gen_len", "layer_devices", "parts"),
    [(16, [0, 1] * 20, 2), (2048, [0] * 20 + [1] * 20, 1), (1, [0] * 20 + [1] * 20, 1)],  # 1: by the Python API
)
def test_resident_layers_alternate_where_the_prompt_gains_more_than_steps_lose(gen_len, layer_devices, parts):
    options = f"--model llama-2-13b --dummy --num-gpus 2 --batch-size 8 --prompt-len 2048 --gen-len {gen_len}"
    machine = Machine(replace(MACHINE, gpus=(H200, H200)))
    for engine in ("stream", "resident"):
        plan = planned(f"{options} --engine {engine}", machine).engine_plan
        assert (list(plan.layer_devices), plan.prefill_micro_batches) == (layer_devices, parts), engine
        assert plan.preallocated_cache, "its memory is planned, too"


@needs_gpus
@pytest.mark.parametrize("family", ["llama", "bloom"])
@pytest.mark.parametrize("engine", ["stream", "resident"])
def test_a_pass_that_cannot_be_divided_is_computed_as_a_whole(engine, family, checkpoints, monkeypatch):
    """A model that makes its own cache would add each micro-batch to it as more positions, and one that records the outputs of its layers
    would record those of a micro-batch. BLOOM's biases have a row for each head."""
    monkeypatch.setattr(devices, "MIN_MICRO_BATCH_FLOPS", 1.0)
    folder, ids = checkpoints(family), random_ids(0, 4, PROMPT, VOCAB)
    options = dict(cpu_compute="off", ring_depth=5) if engine == "stream" else dict(engine=engine)
    loaded, spec, _ = load(folder, devices=2, batch_size=4, **options)
    layers = installed(loaded).layers if engine == "stream" else installed(loaded, LayerDevices)
    cache = DeviceKVCache(spec.config, PROMPT)
    expected, parts = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), []
    layers_of_model = decoder_layers(loaded.model)[1]
    layers_of_model[1].register_forward_hook(lambda *_: parts.append(len(layers.micro_batches)))
    recorded = {"use_cache": False, "output_hidden_states": True}
    with torch.inference_mode():
        plain = expected(ids, **recorded)
        for inputs in ({}, {"past_key_values": cache}, {"use_cache": False}, recorded):
            found = loaded.model(ids.to(loaded.device), **inputs)
            torch.testing.assert_close(found.logits.cpu(), plain.logits, atol=1e-4, rtol=1e-4)
        for one, other in zip(found.hidden_states, plain.hidden_states, strict=True):
            torch.testing.assert_close(one.cpu(), other, atol=1e-4, rtol=1e-4)
        loaded.modules_changed({layers_of_model[0]})
        loaded.model(ids.to(loaded.device), use_cache=False)
    loaded.close()
    assert parts == [1, 2, 2, 1, 1], "not with a cache of its own, recorded outputs, or hooks of others"


@needs_gpus
@pytest.mark.parametrize("engine", ["stream", "resident"])
def test_the_cache_of_a_pass_is_released_with_its_owner(engine, checkpoints):
    loaded, spec, _ = load(checkpoints("llama"), devices=2, engine=engine)
    cache = DeviceKVCache(spec.config, PROMPT)
    with torch.inference_mode():
        loaded.model(random_ids(0, BATCH, PROMPT, VOCAB).to(loaded.device), past_key_values=cache)
    owned = weakref.ref(cache)
    del cache
    gc.collect()
    assert owned() is None
    loaded.close()


@needs_gpus
def test_the_pass_after_one_that_failed_is_right(checkpoints, monkeypatch):
    """It fails in the first layer, before the second device computes anything, and in the second, while a micro-batch is on its way."""
    monkeypatch.setattr(devices, "MIN_MICRO_BATCH_FLOPS", 1.0)
    ids = random_ids(0, 4, PROMPT, VOCAB)
    expected = AutoModelForCausalLM.from_pretrained(checkpoints("llama"), dtype=torch.float32).eval()
    loaded, *_ = load(checkpoints("llama"), devices=2, cpu_compute="off", ring_depth=5, batch_size=4)

    def fail(module, args):
        raise ValueError("this pass fails")

    with torch.inference_mode():
        logits = expected(ids).logits
        for layer in decoder_layers(loaded.model)[1][:2]:
            loaded.timeline.restart()
            hook = layer.register_forward_pre_hook(fail)
            with pytest.raises(ValueError, match="this pass fails"):
                loaded.model(ids.to(loaded.device), use_cache=False)
            hook.remove()
            layers = installed(loaded).layers
            assert (layers.inputs, layers.sent, layers.arrived) == (((), {}), None, []), "its memory is free"
            found = loaded.model(ids.to(loaded.device), use_cache=False).logits.cpu()
            torch.testing.assert_close(found, logits, atol=1e-4, rtol=1e-4)
    assert loaded.timeline.link_use(0) is not None
    loaded.close()


def plan_for_two(free_gib, num_gpus=2, **options):
    """Return the plan of a run on two GPUs, of which so many GiB are free."""
    config = RunConfig(dummy=True, num_gpus=num_gpus, **options).validate()
    job = build_job(config, resolve_model(config, "cpu"), detect_ranks())
    free = tuple(int(each * GIB) for each in free_gib)
    return make_plan(replace(job, devices=job.devices * 2, free_by_device=free)).engine_plan


@pytest.mark.parametrize(("free_gib", "devices"), [((8, 8), 1), ((2, 2), 2), ((2, 0.1), 1)])
def test_without_measured_rates_one_plan_is_made(free_gib, devices, no_gpu, monkeypatch):
    """For one GPU that holds all weights, else for both, else for the one that fits."""
    planned_for, own = [], plan_module._plan_for_devices
    monkeypatch.setattr(plan_module, "_plan_for_devices", lambda job: planned_for.append(len(job.devices)) or own(job))
    plan = plan_for_two(free_gib, num_gpus=None, model="opt-1.3b", engine="stream")
    assert len(plan.job.devices) == devices and planned_for[-1] == devices
    assert len(planned_for) == (2 if min(free_gib) < 1 else 1)


def test_a_gpu_without_layers_needs_no_memory(no_gpu):
    options = dict(model="llama-3.1-70b", engine="stream", quant_bits=4, batch_size=32, prompt_len=2048)
    plan = plan_for_two((100, 6), **options)
    assert set(plan.layer_devices) == {0} and (plan.peak_bytes_on(1), plan.min_free_bytes_on(1)) == (0, 0)


def test_layers_of_a_resident_model_leave_room_for_their_cache(no_gpu, tmp_path):
    fields = dict(hidden_size=8192, intermediate_size=28672, num_attention_heads=64, num_key_value_heads=8)
    AutoConfig.for_model("llama", num_hidden_layers=3, dtype="bfloat16", **fields).save_pretrained(tmp_path)
    plan = plan_for_two((6, 6), model=str(tmp_path), engine="resident", batch_size=8, prompt_len=1024)
    assert plan.device_peak_bytes < 6 * GIB, plan.layer_devices


def test_a_refusal_names_the_gpu_that_has_too_little(no_gpu):
    with pytest.raises(DoesNotFit, match=r"left for them by KV cache .*, of 1 GiB free on GPU 1\.$") as refused:
        plan_for_two((12, 1), model="opt-13b", engine="stream")
    assert "head" not in str(refused.value), "which is on the first one"


@pytest.mark.parametrize(
    "fields, reason",
    [
        (dict(model_type="llama", hidden_size=48, intermediate_size=64, num_attention_heads=4), None),
        (dict(model_type="mamba", hidden_size=48), "it has one state for all layers and no KV cache"),
    ],
)
def test_models_that_need_one_device_say_why(fields, reason):
    config = AutoConfig.for_model(**fields, num_hidden_layers=2, vocab_size=VOCAB)
    with torch.device("meta"):
        assert why_one_device(AutoModelForCausalLM.from_config(config)) == reason
