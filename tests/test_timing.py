"""Predicted times: against hand computations and against runs that H200s have done; of this machine, in test_memory_predictions.py."""

import itertools
import statistics

import numpy as np
import pytest
from conftest import ROOT, replace
from test_machine import MACHINE, planned

from benchmarks.predictions import machine_of, plan_of, without_short_prompts
from zero_inference.engines.stream.cpu_plan import MIN_GAIN
from zero_inference.engines.stream.devices import HOP_HOST_S, HOP_S, count_hops
from zero_inference.hardware.machine import Machine
from zero_inference.hardware.profile import (
    DeviceAttentionTime,
    DeviceProductRate,
    EngineOverhead,
    LaunchOverhead,
    LoadingRates,
    ProductTime,
    device_attention_s,
)
from zero_inference.planning.cost import (
    COMPARED_GB_PER_S,
    LAUNCH_SLOWDOWN,
    RANGES,
    mean_reads,
    overlapped_share,
)
from zero_inference.planning.search import why_not_predicted
from zero_inference.records.read import read_records

GIB = 1 << 30
LAUNCHES = LaunchOverhead(operator_s=12e-6, step_s=1e-3, graph_operator_s=2e-6)
OPERATOR_S = 12e-6 * LAUNCH_SLOWDOWN  # in a run
FAST = replace(MACHINE, launches=LAUNCHES, cores=None, pageable_link_gb_per_s=10.0, disk_gb_per_s=3.0)
SIZES = "--dummy --dtype bfloat16 --prompt-len 128 --gen-len 32"


def times_of(options: str, machine=FAST):
    return planned_times(f"{options} {SIZES}", machine)


def planned_times(options: str, machine):
    plan = planned(options, Machine(machine))
    return plan, plan.times


def test_streamed_weights_take_what_the_link_takes():
    plan, times = times_of("--model opt-13b --engine stream --gpu-memory 0")
    assert times.step.seconds == pytest.approx(plan.engine_plan.fetched_bytes / 55e9) and times.step.bound_by == "link"
    placement = plan.engine_plan.placement
    assert (len(placement.blocks), placement.ring_depth) == (40, 6)
    ring = 5 * placement.slot_bytes  # that 40 blocks go through in turn, each into the same one in every step
    # the ring is full when it begins
    assert times.prefill.seconds == pytest.approx((plan.engine_plan.fetched_bytes - ring) / 55e9)


def test_a_resident_model_takes_what_its_memory_or_the_host_takes():
    plan, times = times_of("--model opt-13b --engine resident")
    traced = plan.job.empty_model.traced_pass(plan.job.spec, 1, 128 + 16)
    host_s = traced.launches * OPERATOR_S + 1e-3

    def kernels_s(bytes_per_s: float) -> float:
        """None takes less than 2 us, and most of them move little."""
        return sum(
            count * max((each.layer_bytes + each.outside_bytes + each.nbytes) / bytes_per_s, each.flops / 700e12, 2e-6)
            for each, count in traced.operators.items()
        )

    assert kernels_s(4200e9) > traced.total("layer_bytes") / 4200e9 + 300 * 2e-6
    assert times.step.seconds == pytest.approx(max(host_s, kernels_s(4200e9) + 1e-3), rel=1e-6)
    slow = replace(FAST, device_gb_per_s=420.0)
    times = times_of("--model opt-13b --engine resident", slow)[1]
    assert times.step.seconds == pytest.approx(kernels_s(420e9) + 1e-3) and times.step.bound_by == "device_memory"
    late = replace(FAST, launches=LaunchOverhead(operator_s=1e-3, step_s=0.0))
    times = times_of("--model opt-13b --engine resident", late)[1]
    assert times.step.seconds == pytest.approx(traced.launches * 1e-3 * LAUNCH_SLOWDOWN)
    assert times.step.bound_by == "launches"


def test_a_time_has_the_range_of_its_kind():
    options = "--model llama-2-13b --engine stream --quant-bits 4"
    kinds = {
        "--engine resident": ("launched", "launched"),
        "--engine stream": ("launched", "step"),  # a graph
        "--engine stream --gpu-memory 0": ("prefill", "step"),
        "--engine resident --batch-size 64": ("prefill", "launched"),
    }
    for others, (of_prefill, of_step) in kinds.items():
        plan, times = times_of(f"--model llama-2-13b {others}")
        assert (times.prefill.kind, times.step.kind) == (of_prefill, of_step), others
        assert times.prefill.range_s == tuple(each * times.prefill.seconds for each in RANGES[of_prefill])
        low, high = (each * times.step.seconds for each in RANGES[of_step])
        batch = plan.job.config.batch_size
        assert times.tokens_per_s_range == pytest.approx((batch / high, batch / low))
        assert plan.predicted.decode_range_s == pytest.approx([31 * low, 31 * high])
    with_cores = times_of(f"{options} --gpu-memory 0", replace(FAST, cores=MACHINE.cores))[1]
    assert with_cores.step.kind == "step with the CPU"
    bound = replace(FAST, matmul_tflops={})
    plan, times = times_of(options, bound)
    assert times.step.range_s is None and times.prefill.range_s is None and times.tokens_per_s_range is None
    assert plan.predicted.decode_range_s is None and " to " not in times.in_words()
    on_cpu = replace(FAST, gpus=())
    plan, times = times_of("--model opt-125m --engine resident", on_cpu)
    assert not times.bounds_because and times.step.range_s is None, "no host without a GPU was measured"


def test_a_long_prefill_takes_what_products_take():
    few = times_of("--model opt-13b --engine resident")[1].prefill
    many = times_of("--model opt-13b --engine resident --batch-size 8")[1].prefill
    assert many.bound_by == "matmul" and many.seconds == pytest.approx(8 * 128 * 2 * 12.6e9 / 700e12, rel=0.15)
    assert few.seconds < many.seconds < 8 * few.seconds


@pytest.mark.parametrize(
    "layer_devices, parts, eighths",
    [
        ((0, 0, 0, 0), 2, 8),
        (
            (0, 1, 0, 1),
            2,
            5,
        ),  # both devices compute, but for the first micro-batch of the first layer, and the last of the last
        ((0, 0, 1, 1), 2, 7),  # only the last layer of one is computed beside the first of the other
        ((0, 1, 0, 1), 1, 8),
    ],
)
def test_micro_batches_of_a_prefill_are_computed_side_by_side(layer_devices, parts, eighths):
    assert overlapped_share(layer_devices, parts) == pytest.approx(eighths / 8)


def test_several_gpus_share_a_long_prefill_of_several_sequences():
    two = replace(FAST, gpus=FAST.gpus * 2, all_links_gb_per_s=110.0, matmul_tflops={"bfloat16": 100.0})
    options = "--model opt-13b --engine stream --gpu-memory 4 --dummy --dtype bfloat16 --prompt-len 512"

    def prefill(batch: int, gpus: int):
        plan, times = planned_times(f"{options} --batch-size {batch} --num-gpus {gpus}", two)
        return plan.engine_plan.prefill_micro_batches, times.prefill.bound_by, times.prefill.seconds

    (*alone, alone_s), (*shared, shared_s) = prefill(32, 1), prefill(32, 2)
    assert (alone, shared) == ([1, "matmul"], [2, "matmul"]) and shared_s == pytest.approx(alone_s / 2, rel=0.05)
    assert prefill(1, 2)[0] == 1, "one sequence is not divided"


@pytest.mark.parametrize(("launches", "hop_s"), [(None, HOP_S), (FAST.launches, HOP_HOST_S)], ids=["device", "host"])
def test_each_hop_to_another_gpu_takes_time(launches, hop_s):
    """That of the host where the device waits for it."""
    assert count_hops((0, 1, 0, 1)) == 4 and count_hops((0, 1, 0)) == 2 and count_hops((0, 0)) == count_hops(()) == 0
    two = replace(FAST, gpus=FAST.gpus * 2, all_links_gb_per_s=110.0, launches=launches)
    options = "--model opt-13b --engine resident --dummy --dtype bfloat16"
    one, halves = (planned_times(f"{options} --num-gpus {gpus}", two)[1].step.seconds for gpus in (1, 2))
    assert halves == pytest.approx(one + 2 * hop_s, rel=1e-6)


def test_accelerate_copies_and_computes_in_turn_from_pageable_memory():
    plan, times = times_of("--model opt-13b --engine accelerate --cpu-offload")
    computing = times_of("--model opt-13b --engine resident")[1].step.seconds
    assert times.step.seconds == pytest.approx(plan.engine_plan.fetched_bytes / 10e9 + computing)
    on_disk = times_of("--model opt-13b --engine accelerate --disk-offload")[1].step
    assert on_disk.seconds == pytest.approx(times.step.seconds + plan.engine_plan.fetched_bytes / 3e9)
    assert on_disk.bound_by == "disk"


def test_deepspeed_takes_at_least_what_the_link_takes():
    plan, times = times_of("--model opt-13b --cpu-offload")
    assert times.step.seconds == pytest.approx(plan.engine_plan.fetched_bytes / 55e9) and times.bounds_because
    assert times.in_words().startswith("at most ") and "(decode step at least " in times.in_words()
    assert "first token at least " in times.in_words()
    assert times.bounds_because == ("the overhead of deepspeed was not measured",)
    pageable = times_of("--model opt-13b --cpu-offload --pin-memory 0")[1]
    assert pageable.step.seconds == pytest.approx(plan.engine_plan.fetched_bytes / 10e9)
    disk = times_of("--model opt-13b --disk-offload")[0]
    assert disk.times.step.seconds == pytest.approx(disk.engine_plan.disk_bytes / 3e9)


HOOKS = EngineOverhead(
    engine="deepspeed", quant_bits=4, start_s=0.01, step_piece_s=1e-3, prefill_piece_s=2e-3, dequantized_gb_per_s=400.0
)


def test_without_a_gpu_dequantizing_takes_deepspeed_most_of_the_time():
    here = replace(FAST, gpus=(), cores=None, device_gb_per_s=20.0, link_gb_per_s=10.0)
    options = "--model opt-1.3b --cpu-offload --quant-bits 4"
    plan, times = times_of(options, here)
    assert times is None
    assert "how long deepspeed takes to dequantize on a CPU was not measured" in why_not_predicted([plan])
    slow = replace(HOOKS, step_piece_s=0.0, dequantized_gb_per_s=2.0)
    plan, times = times_of(options, replace(here, engine_overheads=(slow,)))
    dense = plan.job.empty_model.traced_pass(plan.job.spec, 1, 144).total("layer_bytes")
    assert times.step.bound_by == "host_memory" and times.step.seconds == pytest.approx(dense / 2e9, rel=0.25)


def test_deepspeed_takes_what_its_hooks_and_its_dequantizing_take_where_that_was_measured():
    options = "--model opt-13b --cpu-offload --quant-bits 4"
    machine = replace(FAST, engine_overheads=(HOOKS,))
    plan, times = times_of(options, machine)
    traced, fetches = plan.job.empty_model.traced_pass(plan.job.spec, 1, 128 + 16), plan.engine_plan.cost_terms.fetches
    assert times_of(options)[1].bounds_because and not times.bounds_because and fetches > 6 * 40
    host_s = traced.launches * OPERATOR_S + fetches * 1e-3
    assert times.step.seconds == pytest.approx(host_s + 1e-3, rel=1e-3) and times.step.bound_by == "launches"
    assert times.prefill.seconds == pytest.approx(host_s + fetches * 1e-3 + 1e-3 + 0.01, rel=1e-3)
    quick = replace(HOOKS, step_piece_s=0.0, dequantized_gb_per_s=100.0)
    restoring = times_of(options, replace(FAST, engine_overheads=(quick,)))[1].step
    dense_s = traced.total("layer_bytes") / 100e9
    assert restoring.bound_by == "device_memory" and restoring.seconds == pytest.approx(dense_s, rel=0.1)
    others = [times_of(f"--model opt-13b --cpu-offload {bits}", machine)[1] for bits in ("--quant-bits 8", "")]
    assert [bool(each.bounds_because) for each in others] == [False, True], "other codes count, plain weights do not"


def test_the_link_rests_while_deepspeed_asks_for_further_weights():
    """A single rank does so behind the copies that are under way; dequantizing is asked for later, beside them."""
    hooks = replace(HOOKS, quant_bits=16, step_piece_s=1e-4, prefill_piece_s=2e-4, start_s=0.0)
    codes = replace(HOOKS, step_piece_s=3e-4, prefill_piece_s=4e-4, start_s=0.0)
    machine = replace(FAST, engine_overheads=(hooks, codes))
    for options in ("--model opt-13b --cpu-offload", "--model opt-13b --cpu-offload --quant-bits 4"):
        plan, times = times_of(options, machine)
        link_s = plan.engine_plan.fetched_bytes / 55e9
        assert times.step.bound_by == times.prefill.bound_by == "link"
        assert times.step.seconds == pytest.approx(link_s + plan.engine_plan.cost_terms.fetches * 1e-4)
        assert times.prefill.seconds == pytest.approx(link_s + plan.engine_plan.cost_terms.fetches * 2e-4)


def test_a_prefill_waits_for_the_start_of_its_generation():
    starts = EngineOverhead(engine="stream", quant_bits=16, start_s=0.01, step_piece_s=0.0, prefill_piece_s=0.0)
    options = "--model opt-13b --engine stream --gpu-memory 0"
    with_it = times_of(options, replace(FAST, engine_overheads=(starts,)))[1]
    without = times_of(options)[1]
    assert with_it.prefill.seconds == pytest.approx(without.prefill.seconds + 0.01)
    assert with_it.step == without.step
    late = replace(starts, prefill_piece_s=0.02)
    blocks = times_of(options, replace(FAST, engine_overheads=(late,)))
    assert blocks[0].engine_plan.cost_terms.fetches == 40 and blocks[1].prefill.bound_by == "launches"
    assert blocks[1].prefill.seconds > 40 * 0.02 and blocks[1].step == without.step, "graphs of a step send for nothing"


def test_loading_takes_what_drawing_quantizing_and_keeping_take(checkpoints):
    rates = LoadingRates(
        draw_gb_per_s=500.0, quantize_int8_gb_per_s=40.0, quantize_int4_gb_per_s=20.0, keep_gb_per_s=5.0
    )
    own = replace(HOOKS, load_s=2.0, load_layer_s=0.1)
    machine = replace(FAST, loading=rates, engine_overheads=(own,))
    for options, parts in {
        "--engine resident": (500.0,),
        "--engine stream --gpu-memory 0": (500.0,),
        "--engine stream --gpu-memory 0 --quant-bits 8": (500.0, 40.0),
        "--engine deepspeed --cpu-offload --quant-bits 4": (500.0, 20.0),
    }.items():
        plan = planned(f"--model opt-13b {options} {SIZES}", Machine(machine))
        dense = plan.job.sizes.parameter_bytes
        layer_bytes = 2 * (12 * 5120**2 + 13 * 5120)  # the first decoder layer comes to the host to be compared
        expected = sum(dense / rate for rate in parts) + plan.engine_plan.footprint.host / 5.0
        expected += layer_bytes / COMPARED_GB_PER_S
        assert plan.predicted.load_s == pytest.approx(expected / 1e9 + (2.0 + 40 * 0.1) * ("deepspeed" in options))
    checkpoint = ["--model", str(checkpoints("llama")), "--engine", "resident", "--prompt-len", "8", "--gen-len", "4"]
    read = planned(" ".join(checkpoint), Machine(machine))
    layer_bytes = sum(each.nbytes for each in read.job.empty_model.model.model.layers[0].parameters())
    expected = read.job.sizes.parameter_bytes * (1 / 3.0 + 1 / 10.0) + layer_bytes / COMPARED_GB_PER_S
    assert read.predicted.load_s == pytest.approx(expected / 1e9)
    unknown = replace(machine, disk_gb_per_s=None)
    assert planned(" ".join(checkpoint), Machine(unknown)).predicted.load_s is None
    assert planned(f"--model opt-13b --engine resident {SIZES}", Machine(FAST)).predicted.load_s is None
    on_disk = planned(f"--model opt-13b --disk-offload {SIZES}", Machine(machine))
    assert on_disk.engine_plan.footprint.disk and on_disk.predicted.load_s is None, "the disk's write rate is not known"


def of_attending(seconds: float, copying: float) -> tuple[EngineOverhead, EngineOverhead]:
    """A layer's, of the host."""
    work = EngineOverhead(
        engine="stream", quant_bits=16, kv_offload=True, start_s=0.0, step_piece_s=seconds, prefill_piece_s=0.0
    )
    return work, replace(work, engine="resident", step_piece_s=copying)


def with_bfloat16_cores(**changes):
    products = tuple(each.model_copy(update={"format": "bfloat16", **changes}) for each in MACHINE.cores.products)
    return replace(FAST, cores=replace(MACHINE.cores, products=products))


def test_the_cores_do_not_attend_where_the_host_would_be_late_for_it():
    """By bandwidth alone they would be faster than the link; the host asks for each layer's attention."""
    options = "--model opt-13b --engine stream --kv-offload --pin-kv-cache --async-kv-offload --batch-size 64"
    machine = with_bfloat16_cores()
    attending, sooner = times_of(options, machine)
    slow = replace(machine, engine_overheads=of_attending(0.03, 0.001))
    copying, later = times_of(options, slow)
    assert attending.engine_plan.cost_terms.cpu_attention_layers == 40
    assert copying.engine_plan.cost_terms.cpu_attention_layers == 0
    assert sooner.step.seconds < later.step.seconds < 40 * 0.03
    assert copying.engine_plan.in_words() == [
        "the CPU computes nothing: a step with CPU attention is predicted to take longer"
    ]
    # as it was asked for
    assert times_of(f"{options} --cpu-compute 0.5", slow)[0].engine_plan.cost_terms.cpu_attention_layers == 40
    weights = times_of(f"{options} --gpu-memory 0", slow)[0].engine_plan
    assert weights.cost_terms.cpu_attention_layers == 0 and weights.cpu_bytes > 0, "they multiply all the same"
    said = "the CPU backend does not compute attention: a step with CPU attention is predicted to take longer"
    assert said in weights.in_words()
    both = replace(machine, engine_overheads=of_attending(0.03, 0.03))
    assert times_of(options, both)[0].engine_plan.cost_terms.cpu_attention_layers == 40, "copying costs as much"


@pytest.mark.parametrize("options", ["--gpu-memory 0", ""])
def test_keys_and_values_that_are_not_page_locked_cross_the_link_more_slowly(options):
    """Whether weights cross it, too, or not."""
    options = f"--model opt-13b --engine stream --kv-offload --batch-size 64 {options}"
    locked, without = times_of(f"{options} --pin-kv-cache"), times_of(options)
    kv_bytes = without[0].engine_plan.copied_kv_bytes
    assert kv_bytes == 64 * 144 * 2 * 40 * 5120 * 2
    longer_s = kv_bytes / 10e9 - kv_bytes / 55e9
    assert without[1].step.seconds - locked[1].step.seconds == pytest.approx(longer_s, rel=0.02)
    no_rate = replace(FAST, pageable_link_gb_per_s=None)
    plan, times = times_of(options, no_rate)
    assert times is None and why_not_predicted([plan]) == "the rate of pageable copies (pageable=) is not known"
    assert times_of(f"{options} --pin-kv-cache", no_rate)[1] == locked[1]


# Seconds by heads that share keys, key heads of all sequences, and positions.
PLACES = list(itertools.product((1, 8), (32, 512), (160, 2048)))
GRID = dict(zip(PLACES, (8e-6, 20e-6, 24e-6, 160e-6, 10e-6, 30e-6, 30e-6, 200e-6)))
WITH_GRID = replace(
    LAUNCHES,
    attention=tuple(
        DeviceAttentionTime(heads=heads, key_heads=key_heads, positions=positions, seconds=seconds)
        for (heads, key_heads, positions), seconds in GRID.items()
    ),
)


def test_attention_takes_what_as_many_heads_and_positions_took():
    machine = replace(FAST, launches=WITH_GRID)

    def seconds(heads, key_heads, positions, row_bytes=256, machine=machine):
        return device_attention_s(machine, heads, key_heads, positions, row_bytes)

    for place, expected in GRID.items():
        assert seconds(*place) == pytest.approx(expected)
    assert seconds(1, 8, 100) == 8e-6, "no kernel takes less than that of the fewest"
    assert seconds(1, 272, 1104) == pytest.approx((8 + 20 + 24 + 160) / 4 * 1e-6)
    assert seconds(1, 544, 1104, 128) == seconds(1, 272, 1104), "twice as many of half the width"
    assert seconds(1, 992, 160) == pytest.approx(40e-6) and seconds(1, 512, 3936) == pytest.approx(296e-6)
    assert seconds(4, 32, 160) == pytest.approx((8 + 2 * 3 / 7) * 1e-6)
    assert seconds(1, 32, 160, machine=FAST) is None


@pytest.mark.parametrize(
    "options, heads, key_heads, layers",
    [
        ("--model llama-2-13b --engine stream --quant-bits 4", 1, 40, 40),
        ("--model llama-2-13b --engine stream --quant-bits 4 --decode-graph off", 1, 40, 40),
        ("--model llama-3.1-70b --engine stream --quant-bits 4", 8, 8, 80),
        ("--model opt-13b --engine resident", 1, 40, 40),
    ],
)
def test_a_step_has_the_attention_of_each_layer(options, heads, key_heads, layers):
    """Over the positions that are filled, in a graph too."""
    options += " --dummy --dtype bfloat16 --prompt-len 1000 --gen-len 32 --batch-size 16"
    machines = [replace(FAST, launches=replace(each, operator_s=0.0)) for each in (LAUNCHES, WITH_GRID)]
    (plan, before), (_, after) = (planned_times(options, each) for each in machines)
    traced = plan.job.empty_model.traced_pass(plan.job.spec, 1, 1016)
    [(operator, count)] = [(each, count) for each, count in traced.operators.items() if each.attends]
    assert count == layers and operator.attention == (heads * key_heads, key_heads, 128, 1017)
    wanted_s = device_attention_s(machines[1], heads, 16 * key_heads, 1017, 256)
    was_s = max(2e-6, 16 * operator.nbytes / 4200e9)
    assert after.step.seconds - before.step.seconds == pytest.approx(layers * (wanted_s - was_s), rel=1e-6)
    assert after.prefill == before.prefill


def test_the_cores_work_beside_the_link():
    machine = replace(FAST, cores=MACHINE.cores)
    plan, times = times_of("--model llama-2-13b --engine stream --quant-bits 4 --gpu-memory 0", machine)
    weights = plan.engine_plan
    alone = times_of("--model llama-2-13b --engine stream --quant-bits 4 --gpu-memory 0 --cpu-compute off", machine)[1]
    assert times.step.seconds < 0.6 * alone.step.seconds
    blocks = [weights.placement.blocks[index] for index in weights.placement.cpu_computed]
    hand_offs = sum(1 if block.feed_forward else 2 for block in blocks)
    waits_s = weights.placement.computed_bytes / 100e9 + hand_offs * 1e-4
    assert weights.cost_terms.step_cpu.wait_s == pytest.approx(waits_s) and times.step.seconds > waits_s
    assert times.step.seconds >= (weights.fetched_bytes + weights.cpu_bytes) / 150e9, "never faster than both together"
    alone = without_short_prompts(plan)
    assert times.prefill.seconds < alone.times.prefill.seconds / MIN_GAIN, "128 tokens are few enough for the cores"
    found = alone.engine_plan.placement
    first = set(found.in_host_memory[: found.ring_depth]).intersection(found.streamed)
    assert 0 < len(first) < found.ring_depth, "of what the ring holds for a decode step, the prefill needs these soon"
    rows = 128 * 5120 * 2  # of the input embedding, in host memory
    fetched_s = (found.host_bytes - found.nbytes_of(first) + rows) / 55e9
    assert alone.times.prefill.seconds == pytest.approx(fetched_s)
    layers, experts = weights.cost_terms.step_cpu[:2]
    assert 0.4 < layers < 0.8 and experts == 0.0


def test_two_sizes_tell_bytes_from_what_a_product_takes_besides():
    found = ProductTime.through([(10_000_000, 12e-6), (100_000_000, 48e-6)])
    assert (found.gb_per_s, found.call_s) == pytest.approx((2500.0, 8e-6))
    slower = ProductTime.through([(10_000_000, 4e-6), (100_000_000, 48e-6)])
    assert (slower.gb_per_s, slower.call_s) == pytest.approx((100_000_000 / 48e-6 / 1e9, 0.0)), "not negative"


def test_products_with_codes_are_taken_from_what_was_measured():
    rates = [DeviceProductRate(format="int4", rows=rows, gb_per_s=rate) for rows, rate in ((1, 1000.0), (32, 500.0))]
    machine = replace(FAST, device_products=tuple(rates))
    options = "--model llama-2-13b --engine stream --quant-bits 4"
    plan, of_codes = times_of(options, machine)
    of_memory = times_of(options)[1]
    stored = plan.engine_plan.weight_bytes - 2 * 32000 * 5120 * 2
    gained = of_codes.step.seconds - of_memory.step.seconds
    assert gained == pytest.approx(stored * (1 / 1000e9 - 1 / 4200e9), rel=0.02)
    calls = tuple(replace(each, call_s=1e-4) for each in rates)
    longer = times_of(options, replace(FAST, device_products=calls))[1]
    # of attention's three inputs, and of gate and up, one product each
    assert longer.step.seconds - of_codes.step.seconds == pytest.approx(40 * 4 * 1e-4, rel=0.01)
    several = [times_of(f"{options} --batch-size 2", each)[1].prefill.seconds for each in (machine, FAST)]
    assert several[0] == several[1], "more than 128 tokens are multiplied with weights that were restored"


@pytest.mark.parametrize(
    "options, without",
    [
        ("--engine stream --gpu-memory 0", "link_gb_per_s"),
        ("--engine accelerate --cpu-offload", "pageable_link_gb_per_s"),
        ("--disk-offload", "disk_gb_per_s"),
        ("--engine resident", "device_gb_per_s"),
    ],
)
def test_without_a_rate_nothing_is_predicted(options, without):
    machine = FAST.model_copy(update={without: None})
    assert times_of(f"--model opt-13b {options}", machine)[1] is None
    assert times_of(f"--model opt-13b {options}")[1] is not None


OF_LINK = """
    h200-shared/opt13b-fp16-stream h200-shared/opt13b-int8-stream h200-shared/opt13b-int4-stream h200-shared/opt13b-kv-stream
    h200-shared/opt30b-half-stream h200-shared/llama70b-int4-stream h200-cores/llama13b-int4-bs1-off
""".split()
WITH_CORES = """
    h200-balanced/first_host/llama13b-int4-bs1-auto h200-balanced/first_host/llama13b-int4-bs8-auto
    h200-balanced/first_host/llama13b-int4-bs32-auto h200-balanced/llama13b-bf16-bs1-auto h200-balanced/llama13b-bf16-bs8-auto
    h200-balanced/llama13b-bf16-bs32-auto h200-balanced/llama13b-int4-half-auto h200-balanced/llama70b-int4-20gib-bs1-auto
    h200-balanced/qwen30b-int4-auto h200-cores/opt13b-kv-auto
""".split()


def of_record(name: str, empty_models: dict):
    """The record, and the plan of its run for the machine that the record describes."""
    record = read_records(ROOT / "benchmarks" / "results" / f"{name}.jsonl")[-1]
    return record, plan_of(record, Machine(machine_of(record)), empty_models)


@pytest.fixture(scope="module")
def empty_models() -> dict:
    return {}


@pytest.mark.parametrize("name", OF_LINK)
def test_steps_bound_by_the_link_are_predicted_to_3_percent(name, empty_models):
    record, plan = of_record(name, empty_models)
    step_s = record["decode_latency_s"] / (record["gen_len"] - 1)
    assert plan.times.step.seconds == pytest.approx(step_s, rel=0.03)
    assert plan.predicted.decode_s == pytest.approx(record["decode_latency_s"], rel=0.03)
    assert plan.times.prefill.seconds == pytest.approx(record["prefill_latency_s"], rel=0.16)
    assert plan.predicted.peak_host_bytes == pytest.approx(record["peak_host_bytes"], rel=0.05)


def test_steps_with_the_cores_are_predicted_to_10_percent(empty_models):
    errors = []
    for name in WITH_CORES:
        record, plan = of_record(name, empty_models)
        step_s = record["decode_latency_s"] / (record["gen_len"] - 1)
        errors.append(step_s / plan.times.step.seconds - 1)
        assert abs(errors[-1]) < 0.1, name
        # since then
        moved = 0 if record["stream"].get("embedding_on_host") else plan.engine_plan.placement.embedding_bytes
        assert plan.predicted.peak_host_bytes - moved == pytest.approx(record["peak_host_bytes"], rel=0.05)
    assert (
        abs(statistics.median(errors)) < 0.06
    )  # records from before the attention kernel, which plans count (3% of a step)


def test_more_tokens_than_the_fused_products_take_are_multiplied_with_restored_weights():
    """33 tokens take what 32 do, and a write and a read of the layers in 16 bits; with groups that the kernel does not know all do."""
    options = "--model llama-2-13b --engine stream --quant-bits 4"
    (plan, few), (_, many) = (times_of(f"{options} --batch-size {batch}") for batch in (32, 33))
    restored = 2 * plan.job.empty_model.traced_pass(plan.job.spec, 1, 144).total("layer_bytes") / 4200e9
    assert many.step.seconds - few.step.seconds == pytest.approx(restored, rel=0.05)
    odd = times_of(f"{options} --quant-group-size 256")[1].step.seconds
    assert odd > times_of(options)[1].step.seconds + 0.9 * restored


def test_an_expert_is_read_once_for_the_tokens_that_are_multiplied_together():
    assert mean_reads(1, 0.25, 1) == pytest.approx(0.25) and mean_reads(0, 0.25, 8) == 0
    assert mean_reads(32, 0.25, 32) == pytest.approx(1 - 0.75**32), "once, where any token chose it"
    assert mean_reads(32, 0.25, 1) == pytest.approx(32 * 0.25), "for each token anew"
    draw = np.random.default_rng(0).binomial(32, 0.25, 100_000)
    for together in (8, 16):
        assert mean_reads(32, 0.25, together) == pytest.approx(np.ceil(draw / together).mean(), rel=0.01)
    assert 1 < mean_reads(32, 0.25, 16) < 1.01 < mean_reads(32, 0.25, 8) < 1.5
