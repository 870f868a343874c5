"""The stream engine gives the ids of plain transformers however its layers are placed, and stays within its memory."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import random
import re
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
import torch
from conftest import FAMILIES, ROOT, VOCAB, build_model, plain_ids, start_python, without_gpus
from forks import PROGRAM, wait_for_all

from zero_inference.config.options import MULTI_GPU_ENGINES
from zero_inference.config.run_config import RunConfig
from zero_inference.engines.stream.blocks import Block
from zero_inference.engines.stream.layout import BlockLayout
from zero_inference.engines.stream.placement import DEFAULT_RING_DEPTH, plan_placement
from zero_inference.engines.stream.streams import BlockSpan, ComputeStreams, Copy, DeviceStreams, DeviceTimeline
from zero_inference.errors import DoesNotFit, UsageError
from zero_inference.hardware import bench_copies
from zero_inference.kv_cache.device import DeviceKVCache
from zero_inference.measure.loops import measure_loops
from zero_inference.measure.session import TRACED_TOKENS, LinkMonitor, link_use_in
from zero_inference.models.prompts import random_ids
from zero_inference.models.spec import resolve_model
from zero_inference.planning.make_plan import make_plan, plan_run
from zero_inference.planning.plan import build_job
from zero_inference.utils.ranks import detect_ranks, start_process_group

BATCH, PROMPT, GEN = 2, 9, 8
SMALL = dict(
    hidden_size=64, intermediate_size=192, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128
)
LONGER = {
    "llama-7-layers": dict(FAMILIES["llama"], num_hidden_layers=7),
    "experts-in-every-other-layer": dict(
        SMALL, model_type="qwen2_moe", num_hidden_layers=5, moe_intermediate_size=64, shared_expert_intermediate_size=64,
        num_experts=4, num_experts_per_tok=2, decoder_sparse_step=2, tie_word_embeddings=False,
    ),
    "sliding-windows": dict(
        SMALL, model_type="gemma2", num_hidden_layers=5, head_dim=16, sliding_window=8, query_pre_attn_scalar=16
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def longer(tmp_path_factory):
    """name -> (folder, ids of plain transformers)."""

    @functools.cache
    def get(name: str):
        folder = tmp_path_factory.mktemp(name) / "model"
        save_as(name, LONGER[name], folder)
        return folder, plain_ids(folder, random_ids(0, BATCH, PROMPT, VOCAB), GEN)

    return get


def save_as(name: str, fields: dict, folder) -> None:
    """Save a model that is no family of other tests."""
    FAMILIES[name] = fields
    try:
        build_model(name).save_pretrained(folder)
    finally:
        del FAMILIES[name]


def load(folder, devices=1, **options):
    """Load with the stream engine, over several GPUs, or where there are none, as if the CPU were `devices` of them."""
    chosen = dict(engine="stream", dtype="float32", batch_size=BATCH, prompt_len=PROMPT, gen_len=GEN)
    chosen["engine"] = options.get("engine", "stream")
    if chosen["engine"] == "stream":
        chosen["gpu_memory"] = 0  # on a GPU small models would stay there
    if chosen["engine"] in MULTI_GPU_ENGINES and (devices > 1 or torch.cuda.is_available()):
        chosen["num_gpus"] = devices
    config = RunConfig(model=str(folder), **chosen | options).validate()
    ranks = detect_ranks()
    spec = resolve_model(config, ranks.device.type)
    start_process_group(ranks)
    if devices == 1:
        return plan_run(config, spec, ranks).load(), spec, ranks
    job = build_job(config, spec, ranks)
    if not job.on_gpu:
        job = replace(job, devices=(ranks.device,) * devices)
    return make_plan(job).load(), spec, ranks


def generate(loaded, spec, ranks, gen_len=GEN, loops=2, warmup=0, **others):
    cache = DeviceKVCache(spec.config, PROMPT + gen_len)

    def make():
        cache.reset()
        return cache

    return measure_loops(loaded, random_ids(0, BATCH, PROMPT, VOCAB), gen_len, loops, warmup, ranks, make, **others)


def ids_of(folder, **options) -> torch.Tensor:
    """Return the ids that an engine generates, which is closed."""
    loaded, spec, ranks = load(folder, **options)
    found = generate(loaded, spec, ranks).output_ids
    loaded.close()
    return found


@pytest.mark.parametrize("name", LONGER)
@pytest.mark.parametrize("depth", [2, 3, 4, 5, 9])
def test_any_ring_depth(name, depth, longer):
    """One that divides the layers and one that does not, as many slots as layers, and more than there are layers."""
    folder, expected = longer(name)
    layers = LONGER[name]["num_hidden_layers"]
    loaded, spec, ranks = load(folder, ring_depth=depth)
    assert loaded.facts["stream"]["streamed_layers"] == layers
    assert loaded.facts["stream"]["ring_depth"] == min(depth, layers)
    assert torch.equal(generate(loaded, spec, ranks).output_ids, expected)
    loaded.close()


def test_the_link_is_measured_from_the_page_locked_layers_and_leaves_them_as_they_are(longer, monkeypatch):
    monkeypatch.setattr(bench_copies, "MIN_BYTES", 1)
    folder, expected = longer("llama-7-layers")
    loaded, spec, ranks = load(folder)
    pinned = loaded.facts["stream"]["streamed_layers"] if ranks.device.type == "cuda" else 0
    assert len(loaded.pinned_memory) == pinned
    assert all(share.is_pinned() for share in loaded.pinned_memory)
    link = LinkMonitor(ranks, loaded.pinned_memory)
    for _ in range(2):
        assert torch.equal(generate(loaded, spec, ranks, loops=1).output_ids, expected)
        link.measure(seconds=0)
    assert torch.equal(generate(loaded, spec, ranks).output_ids, expected)
    loaded.close()


@pytest.mark.parametrize("bits", [16, 8])
def test_any_number_of_resident_layers(bits, longer):
    folder, expected = longer("llama-7-layers")
    seen, first = set(), None
    numbers = range(8) if bits == 16 else (0, 3, 7)
    for kept in numbers:
        loaded, spec, ranks = load(
            folder,
            cpu_compute="off",
            decode_graph="on" if kept % 2 else "auto",
            quant_bits=bits,
            quant_group_size=32 if bits == 8 else 64,
            gpu_memory=kept * (190 if bits == 16 else 60.2) * 1024 / 2**30,
        )
        seen.add(loaded.facts["stream"]["resident_layers"])
        ids = generate(loaded, spec, ranks).output_ids
        first = ids if first is None else first
        assert torch.equal(ids, expected if bits == 16 else first)
        # a new cache: its graph is recorded and tried in the warm-up, by passes that fetch all layers once more
        moved = generate(loaded, spec, ranks, loops=1, warmup=1).loops[0].moved.host_to_device_bytes_per_step
        facts = loaded.facts["stream"]
        rows = BATCH * 64 * 4 if facts["embedding_on_host"] else 0  # on a GPU
        assert moved == facts["streamed_layers"] * facts["slot_bytes"] + rows
        loaded.close()
    assert seen == set(numbers)


class _NamedStreams(DeviceStreams):
    """Streams of a device with a name each, of which one is current, as on a GPU; `order` is what was asked of them."""

    def __init__(self, device: int, order: list[str]):
        super().__init__(torch.device("cpu"))
        self.number, self.at, self.order = device, f"caller's of {device}", order

    def stream(self, name=None):
        name = name or f"own of {self.number}"
        return SimpleNamespace(name=name, wait_stream=lambda other: self.order.append(f"{name} waits for {other.name}"))

    def current(self):
        return self.stream(self.at)

    def blocking_event(self):
        after: list[str] = []
        return SimpleNamespace(
            record=lambda stream: after.append(stream.name),
            synchronize=lambda: self.order.append(f"the host waits for {after[-1]}"),
        )

    def make_current(self, stream):
        self.at = stream.name


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("breaks_off", [False, True])
@pytest.mark.parametrize("as_graph", [False, True])
def test_a_model_computes_on_its_own_streams_in_order_with_its_caller(as_graph, breaks_off, devices):
    order: list[str] = []
    streams = [_NamedStreams(device, order) for device in range(devices)]
    model = torch.nn.Identity()

    def forward(values):
        with compute.entered() if as_graph else contextlib.nullcontext():  # as a call that repeats a graph
            order.append(f"computes on the {streams[0].at}")
            if breaks_off:
                raise RuntimeError("as a full device would")
            return values

    model.forward = forward
    compute = ComputeStreams(model, streams)
    with pytest.raises(RuntimeError, match="full device") if breaks_off else contextlib.nullcontext():
        model(torch.zeros(1))
    last_first = range(devices)[::-1]  # so that the first device is current in the end
    assert order == [
        *[f"own of {each} waits for caller's of {each}" for each in last_first],
        "computes on the own of 0",
        *[f"caller's of {each} waits for own of {each}" for each in last_first],
        *["the host waits for own of 0"] * (devices > 1),
    ]
    assert [each.at for each in streams] == [f"caller's of {each}" for each in range(devices)]
    compute.close()
    as_graph = False
    order.clear()
    with pytest.raises(RuntimeError) if breaks_off else contextlib.nullcontext():
        model(torch.zeros(1))
    assert order == ["computes on the caller's of 0"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CPU has no streams")
def test_on_a_gpu_no_layer_computes_on_the_default_stream(checkpoints):
    assert torch.cuda.current_stream() == torch.cuda.default_stream(), "an earlier test has left its stream current"
    loaded, spec, ranks = load(checkpoints("llama"), decode_graph="on")
    seen = set()
    hook = loaded.model.model.layers[1].register_forward_pre_hook(
        lambda *args: seen.add(torch.cuda.current_stream().cuda_stream)
    )
    loaded.model(random_ids(0, BATCH, PROMPT, VOCAB).to(loaded.device))
    assert seen and torch.cuda.default_stream().cuda_stream not in seen
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    hook.remove()
    generate(loaded, spec, ranks)
    assert loaded.facts["stream"]["decode_graph"].unused_because is None
    assert torch.cuda.current_stream() == torch.cuda.default_stream(), "after steps that were repeated as graphs"
    loaded.close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("devices", [1, 2])
def test_the_host_waits_for_the_layers_of_several_gpus(devices):
    model = torch.nn.Identity()
    model.forward = lambda values: torch.cuda._sleep(1 << 28)  # 0.15 s at 1.8 GHz
    compute = ComputeStreams(model, [DeviceStreams(torch.device("cuda", each)) for each in range(devices)])
    model(torch.zeros(1))
    assert compute.streams[0].query() == (devices > 1)
    torch.cuda.synchronize()


def test_loops_run_without_long_collections(checkpoints, request):
    loaded, spec, ranks = load(checkpoints("llama"))
    seen = []
    hook = loaded.model.register_forward_pre_hook(lambda *args: seen.append(gc.get_freeze_count()))
    generate(loaded, spec, ranks)
    hook.remove()
    assert min(seen) > 100_000  # the objects of torch and transformers
    assert gc.get_freeze_count() > 100_000 and gc.isenabled(), "`short_full_collections` goes on"
    request.getfixturevalue("nothing_frozen")
    generate(loaded, spec, ranks)
    assert gc.get_freeze_count() == 0 and gc.isenabled()
    loaded.close()


def test_logits_are_bit_equal_to_the_resident_engine(checkpoints):
    for family in FAMILIES:
        for dtype in ("float32", "bfloat16", *(["float16"] if torch.cuda.is_available() else [])):
            logits = []
            for engine in ("resident", "stream"):
                loaded, _, _ = load(checkpoints(family), engine=engine, dtype=dtype)
                with torch.no_grad():
                    logits.append(loaded.model(random_ids(3, BATCH, PROMPT, VOCAB).to(loaded.device)).logits)
                loaded.close()
            assert torch.equal(*logits), (family, dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"cpu_compute": "off"}, {"cpu_compute": "0.5"}, {"cpu_compute": "1", "decode_graph": "on"}],
    ids=["link", "cores", "graph"],
)
def test_a_thousand_steps_take_no_more_memory_and_stay_right(options, tmp_path):
    save_as("long", dict(FAMILIES["llama"], max_position_embeddings=1100), tmp_path / "model")
    quantized = {"quant_bits": 8, "quant_group_size": 32}
    loaded, spec, ranks = load(tmp_path / "model", ring_depth=2, gen_len=1001, **quantized, **options)
    generate(loaded, spec, ranks, gen_len=1001, loops=1)
    host, device = psutil.Process().memory_info().rss, torch.cuda.memory_reserved()
    again = generate(loaded, spec, ranks, gen_len=1001, loops=1)
    assert psutil.Process().memory_info().rss - host < 8 << 20 and torch.cuda.memory_reserved() - device < 4 << 20
    fast = generate(loaded, spec, ranks, gen_len=31, loops=1)
    assert torch.equal(again.output_ids[:, :31], fast.output_ids)
    assert len(set(again.output_ids.flatten().tolist())) > 20
    loaded.close()
    if options != {"cpu_compute": "off"}:
        return
    exact, spec, ranks = load(tmp_path / "model", ring_depth=2, gen_len=1001)
    expected = plain_ids(tmp_path / "model", random_ids(0, BATCH, PROMPT, VOCAB), 1001)
    assert torch.equal(generate(exact, spec, ranks, gen_len=1001, loops=1).output_ids, expected)
    exact.close()


def test_record_trace_and_output_say_what_the_link_did(checkpoints, run_model, tmp_path):
    options = "--engine stream --dtype float32 --batch-size 2 --prompt-len 8 --gen-len 6 --loops 2 --ring-depth 2 --gpu-memory 0"
    done = run_model("--model", checkpoints("qwen3"), *options.split(), "--trace", tmp_path / "trace.json")
    assert done.code == 0, done.stderr
    record = done.record
    assert record["cpu_offload"] and record["engine"] == "stream" and record["ds_config"] is None
    use, steps = record["link_use"], 5
    copies = steps * 3 - 1  # the first of the window only opens it
    assert use["copied_bytes"] == copies * record["stream"]["slot_bytes"]
    assert use["busy_s"] > 0 and min(use.values()) >= 0
    times = (use["busy_s"], use["slot_wait_s"], use["host_late_s"], use["step_start_s"])
    assert sum(times) <= record["loops"][-1]["total_s"]
    limit = record["limit"]
    assert limit["bound_by"] in ("device_memory", "matmul", "link") and 0 < limit["fraction_of_limit"] < 1
    floors = {name: steps * step_s for name, step_s in limit["floor_step_s"].items()}
    if "link" in floors:  # what had crossed before the first decode step is not owed
        assert 0 <= limit["link_ahead_bytes"] <= 2 * record["stream"]["slot_bytes"], "no more than the ring's slots"
        floors["link"] = max(0, floors["link"] - limit["link_ahead_bytes"] / (limit["link_gbps"] * 1e9))
    assert limit["floor_decode_s"] == pytest.approx(max(floors.values()))
    shares = ("% of the limit of ", "% of the link's limit: ", " ms of a step; the rest is ")
    assert any(words in done.stdout for words in shares)
    spans = [event for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if event["ph"] == "X"]
    names = [span["name"] for span in spans]
    assert names.count("layer 1") == 6 and names.count("copy layer 1") == 6
    assert all(span["dur"] >= 0 for span in spans)


@pytest.mark.parametrize("engine", ["deepspeed", "accelerate"])
def test_a_trace_of_any_engine_shows_the_layers(engine, checkpoints, run_model, tmp_path):
    options = f"--engine {engine} --cpu-offload --dtype float32 --prompt-len 8 --gen-len 6 --loops 1 --warmup 0"
    done = run_model("--model", checkpoints("llama"), *options.split(), "--trace", tmp_path / "trace.json")
    assert done.code == 0, done.stderr
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    seen = [event["name"] for event in events if event.get("cat") == "user_annotation"]  # CUDA adds gpu_user_annotation
    assert seen.count("layer 0") == seen.count("layer 2") == TRACED_TOKENS
    if done.record["device"] == "cpu":
        assert done.record["link_use"] is None, "a CPU has no link"
    else:
        assert done.record["link_use"]["copied_bytes"] > 0 and done.record["link_use"]["busy_s"] > 0


def test_link_use_of_a_trace_counts_overlapping_copies_once():
    def copy(ts, dur):
        name = "Memcpy HtoD (Pinned -> Device)"
        return {"cat": "gpu_memcpy", "name": name, "ts": ts, "dur": dur, "args": {"bytes": 1000}}

    layers = [{"cat": "user_annotation", "name": "layer 0", "ts": ts, "dur": 1} for ts in (0, 100, 200)]
    use = link_use_in(layers + [copy(50, 10), copy(100, 50), copy(120, 50), copy(200, 30)])
    assert use.busy_s == pytest.approx(100e-6) and use.idle_s == pytest.approx(30e-6) and use.copied_bytes == 3000
    on_device = [dict(layer, cat="gpu_user_annotation", ts=layer["ts"] + 70) for layer in layers]  # CUDA repeats them
    assert link_use_in(layers + on_device + [copy(50, 10), copy(100, 50), copy(120, 50), copy(200, 30)]) == use
    assert link_use_in(layers) is None and link_use_in([copy(0, 1)]) is None


def test_loading_takes_little_more_than_the_weights(checkpoints, fork_server, tmp_path):
    """Peak of the process while it reads a checkpoint of 256 MB in several files, against what it stores.

    On the CPU, where all of it is memory of the process; CUDA's context and page-locked memory would be counted too.
    """
    sizes = dict(hidden_size=512, intermediate_size=2048, num_hidden_layers=32, num_key_value_heads=8)
    build_model("llama", "bfloat16", lively=False, **sizes).save_pretrained(tmp_path / "model", max_shard_size="60MB")
    program = tmp_path / "load.py"
    program.write_text(f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
import torch
from test_stream import load
bits, group = int(sys.argv[1]), 64 if sys.argv[1] == "16" else 32
load({str(checkpoints("llama", "bfloat16"))!r}, dtype="bfloat16")[0].close()

def memory(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key)) * 1024

from zero_inference.models.weights import return_free_memory
return_free_memory()
open("/proc/self/clear_refs", "w").write("5")  # start the peak anew
before = memory("VmRSS")
loaded, _, _ = load("model", dtype="bfloat16", ring_depth=2, cpu_compute="off", quant_bits=bits, quant_group_size=group)
stream = loaded.facts["stream"]
on_device = stream["ring_depth"] * stream["slot_bytes"] + stream["workspace_bytes"]
print((memory("VmHWM") - before - on_device) / loaded.weight_bytes, loaded.weight_bytes)
""")
    # of 8 bits 20 MB of quantizer are a seventh of these weights, and some MB of scatter
    for bits, bound in ((16, 1.1), (8, 1.3)):
        out, err = tmp_path / f"{bits}.out", tmp_path / f"{bits}.err"
        process = start_python(fork_server(PROGRAM), [program, bits], tmp_path, out, err, without_gpus())
        assert wait_for_all([process], timeout=240) == [0], err.read_text()
        ratio, stored = map(float, out.read_text().split()[-2:])
        assert stored > 100e6 and ratio < bound, (bits, ratio)


def layers_of(*sizes, workspace=0) -> list[Block]:
    """Layers of these sizes, each one block."""
    layouts = [BlockLayout(nbytes=size, stored_bytes=size, workspace_bytes=workspace) for size in sizes]
    return [Block(layer, "", (), layout=layout) for layer, layout in enumerate(layouts)]


def test_resident_layers_are_spread_evenly_and_the_device_is_not_overfilled():
    gib = 1 << 30
    plan = plan_placement(layers_of(*[gib] * 8), 0, [None], 4, 2)
    assert plan.resident == [1, 3, 5, 7] and plan.in_host_memory == [0, 2, 4, 6] and plan.ring_depth == 2
    everything = plan_placement(layers_of(*[gib] * 8), gib, [9 * gib], None, None)
    assert everything.in_host_memory == [] and everything.ring_depth == 0 and everything.device_bytes == 9 * gib
    tight = plan_placement(layers_of(*[gib] * 8), 0, [5 * gib], None, None)
    assert tight.resident_bytes + tight.ring_depth * tight.slot_bytes <= 5 * gib and tight.ring_depth >= 2
    eight = layers_of(*[gib] * 8)
    with pytest.raises(DoesNotFit, match="^2 ring slots of 1 GiB each do not fit into the .* left for them.$"):
        plan_placement(eight, 0, [int(1.5 * gib)], None, None)
    with pytest.raises(DoesNotFit, match="--gpu-memory 4.9 or less"):
        plan_placement(eight, 0, [6 * gib], 6, None)
    with pytest.raises(DoesNotFit, match="--ring-depth 4 or less"):
        plan_placement(eight, 0, [6 * gib], 2, 5)
    squeezed = plan_placement(eight, 0, [6 * gib], 3, None)
    assert len(squeezed.resident) == 3 and squeezed.ring_depth == 3, "an automatic ring gives way"


@pytest.mark.parametrize("seed", range(8))
def test_plans_fit_and_their_advice_works(seed):
    draw = random.Random(seed)
    for _ in range(100):
        sizes = [draw.randint(1, 40) << 26 for _ in range(draw.randint(2, 24))]
        blocks = layers_of(*sizes, workspace=draw.choice([0, 1 << 27]))
        free, depth = draw.randint(1 << 28, 40 << 30), draw.choice([None, None, 2, 3, 9])
        wanted = draw.choice([None, 0, draw.randint(0, 300) / 10])
        try:
            plan = plan_placement(blocks, 0, [free], wanted, depth)
        except DoesNotFit as error:
            advice = dict(re.findall(r"--(gpu-memory|ring-depth) ([0-9.]*[0-9])", str(error).partition("; use ")[2]))
            if not advice:
                assert 2 * max(sizes) + blocks[0].layout.workspace_bytes > free
                continue
            gib = float(advice["gpu-memory"]) if "gpu-memory" in advice else wanted
            plan = plan_placement(blocks, 0, [free], gib, int(advice.get("ring-depth", depth or 0)) or None)
        assert plan.device_bytes <= free and len(plan.resident) + len(plan.in_host_memory) == len(blocks)


def test_the_ring_covers_the_time_between_two_tokens():
    layers = layers_of(*[630 << 20] * 40)
    ahead = plan_placement(layers, 0, [1 << 40], 0, None).ring_depth - 1
    assert 0.05 <= ahead * (630 << 20) / 55e9 < 0.065
    assert plan_placement(layers, 0, [None], 0, None).ring_depth == DEFAULT_RING_DEPTH, "on a CPU, in host memory"


class Moment:
    """An event at a known time in milliseconds."""

    def __init__(self, at: float):
        self.at = at

    def elapsed_time(self, later) -> float:
        return later.at - self.at


def test_idle_time_goes_to_who_caused_it():
    timeline = DeviceTimeline(DeviceStreams(torch.device("cpu")))
    timeline.pass_index = 1

    def copy(start, end, free=None, begun=None, pass_start=None, first=False):
        """Its slot was free at `free`, and before that used by a block that `begun`, in a pass that began at `pass_start`."""
        freed_by = None if begun is None else BlockSpan(0, Moment(begun), Moment(pass_start))
        timeline.copies.append(
            Copy(0, 10, free and Moment(free), freed_by, Moment(start), Moment(end), timeline.pass_index, first)
        )

    def use(first=1):
        found = timeline.link_use(first)
        return [found.busy_s, found.slot_wait_s, found.step_start_s, found.host_late_s, found.copied_bytes]

    copy(0, 10)
    copy(15, 20, free=15, begun=8, pass_start=5)  # its slot's layer computed from 8 to 15: the device
    # the first layer of a step began at 55 only: start of a step, then 5 ms of computing
    copy(60, 70, free=60, begun=55, pass_start=55)
    copy(90, 95, free=60, begun=60, pass_start=55)  # free since long: the host did not ask
    assert use() == pytest.approx([0.020, 0.010, 0.035, 0.020, 30])
    # the CPU multiplies the first blocks of a step, from 105 to 125, then the device one that freed a slot
    copy(130, 140, free=130, begun=125, pass_start=105)
    assert use() == pytest.approx([0.030, 0.015, 0.045, 0.040, 40])
    timeline.pass_index = 2  # and from there on alone
    copy(150, 160)
    assert timeline.link_use(2) is None
    copy(160, 180)
    assert use(2) == pytest.approx([0.020, 0, 0, 0, 10])


def test_what_crossed_before_the_first_decode_step_counts_by_its_share_of_time():
    timeline = DeviceTimeline(DeviceStreams(torch.device("cpu")))

    def fetched(nbytes, start, end):
        timeline.record_copy(Copy(0, nbytes, None, None, Moment(start), Moment(end)))

    timeline.begin_pass(0)
    fetched(1, 0, 10)  # the prefill's own
    fetched(100, 10, 20)
    fetched(200, 20, 40)  # the last layer of the prefill ended after a quarter of it
    fetched(400, 40, 50)
    timeline.spans.append(BlockSpan(2, Moment(5), Moment(5), Moment(25)))
    timeline.begin_pass(3)
    assert timeline.link_use() is None, "no copy of a decode step yet"
    timeline.spans.append(BlockSpan(0, Moment(25), Moment(25), Moment(60)))
    for start in (50, 60, 70):
        fetched(800, start, start + 10)
    assert timeline.link_use().ahead_bytes == 100 + 200 // 4
    timeline.begin_pass(3)  # later steps were ahead of nothing but each other
    fetched(800, 80, 90)
    assert timeline.link_use().ahead_bytes == 150
    timeline.restart()
    timeline.begin_pass(3)
    timeline.spans.append(BlockSpan(2, Moment(0), Moment(0), Moment(1)))
    timeline.begin_pass(0)  # nothing was asked for ahead
    for start in (1, 11):
        fetched(800, start, start + 10)
    assert timeline.link_use().ahead_bytes == 0


def test_a_group_size_that_does_not_divide_is_refused(checkpoints):
    with pytest.raises(UsageError, match="--quant-group-size 48.*use --quant-group-size 64"):
        load(checkpoints("llama"), quant_bits=4, quant_group_size=48)
    with pytest.raises(UsageError, match="--quant-group-size 256.*use --quant-group-size 64"):
        load(checkpoints("llama"), quant_bits=4, quant_group_size=256)  # wider than every matrix


def test_tied_weights_stay_tied_and_on_the_device(checkpoints):
    loaded, _, _ = load(checkpoints("opt"))
    model = loaded.model
    assert model.lm_head.weight is model.model.decoder.embed_tokens.weight
    assert loaded.weight_bytes == 4 * sum(p.numel() for p in build_model("opt").parameters())
    loaded.close()


@pytest.mark.slow
def test_host_memory_that_is_refused_is_a_clear_error(run_model):
    # on the CPU: a CUDA context maps more than any such limit
    done = run_model(
        *"--model opt-1.3b --dummy --dtype bfloat16 --engine stream --prompt-len 8 --gen-len 2".split(),
        on_cpu=True,
        memory_bytes=3 << 29,  # enough to plan, which threads make uneven, and not for 2.4 GiB of weights
    )
    assert done.code == 1 and "Traceback" not in done.stderr, done.stderr
    assert "memory" in done.stderr and done.record["status"] == "failed"
