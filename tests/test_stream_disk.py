"""Weights on NVMe with the stream engine: the ids of weights in memory, the plan's budgets, and faults of disk and files."""

from __future__ import annotations

import ctypes
import errno
import functools
import itertools
import json
import mmap
import os
import random
import shutil
import time
from dataclasses import astuple, replace
from pathlib import Path

import psutil
import pytest
import safetensors
import torch
from conftest import VOCAB, plain_ids, small_disk, too_few_gpus
from test_stream import BATCH, GEN, PROMPT, generate, ids_of, load, save_as

from zero_inference.cli import console_main, main
from zero_inference.config.run_config import RunConfig
from zero_inference.engines.offload_folder import OffloadWorkspace
from zero_inference.engines.stream.disk import DISK_SLOTS, DiskBlocks, DiskReader
from zero_inference.engines.stream.expert_cache import HostExperts
from zero_inference.errors import RunError, UsageError
from zero_inference.hardware.machine import Machine
from zero_inference.models.prompts import random_ids
from zero_inference.models.spec import resolve_model
from zero_inference.planning.make_plan import make_plan
from zero_inference.planning.plan import build_job
from zero_inference.utils.direct_io import DirectIO, Extent
from zero_inference.utils.ranks import detect_ranks
from zero_inference.utils.timing import Transfers

GIB = 1 << 30
SIZES = dict(hidden_size=64, num_hidden_layers=4, num_attention_heads=4, max_position_embeddings=64)
MORE = {
    "gpt2": dict(model_type="gpt2", n_embd=64, n_layer=4, n_head=4, n_positions=64),
    "qwen3_moe": SIZES | dict(
        model_type="qwen3_moe", num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64
    ),
    "gpt_oss": SIZES | dict(
        model_type="gpt_oss", num_key_value_heads=2, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=8,
        intermediate_size=64,
    ),
}  # fmt: skip
CASES = [(family, bits) for family in ("llama", "opt", "gpt2", "qwen3_moe", "mixtral", "gpt_oss") for bits in (16, 4)]
IDS = random_ids(0, BATCH, PROMPT, VOCAB)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Slots that are smaller than most blocks of these models."""
    monkeypatch.setattr("zero_inference.engines.stream.disk.PIECE_BYTES", 16384)


@pytest.fixture(scope="module")
def models(checkpoints, tmp_path_factory):
    """Return the function name -> folder of a checkpoint in float32."""

    @functools.cache
    def get(name: str) -> Path:
        if name not in MORE:
            return checkpoints(name)
        save_as(name, MORE[name], folder := tmp_path_factory.mktemp(name) / "model")
        return folder

    return get


def plan_of(folder, machine=None, **options):
    chosen = dict(engine="stream", dtype="float32", batch_size=BATCH, prompt_len=PROMPT, gen_len=GEN, gpu_memory=0)
    ranks = detect_ranks()
    if ranks.device.type == "cuda":
        chosen["num_gpus"] = 1  # as `load`
    config = RunConfig(model=str(folder), **chosen | options).validate()
    return make_plan(
        build_job(config, resolve_model(config, ranks.device.type), ranks, machine=machine or Machine())
    ).engine_plan


def budget(folder, share: float, **options) -> float:
    """Return the GiB of host memory that hold the slots of blocks on disk, and a share of what then is not in host memory."""
    placement = plan_of(folder, disk_offload=True, **options).placement
    slots = placement.disk_slots_bytes
    return (slots + share * max(0, placement.disk_bytes - slots) + placement.embedding_bytes) / GIB


@pytest.mark.parametrize("family, bits", [*CASES, ("llama", 8), ("mixtral", 8)])
def test_the_ids_are_those_of_weights_in_memory(family, bits, models, tmp_path):
    """With all blocks on disk, half of them, and nearly none."""
    folder, options = models(family), dict(quant_bits=bits, offload_dir=str(tmp_path))
    if bits < 16:
        options["quant_group_size"] = 16
    expected = plain_ids(folder, IDS, GEN) if bits == 16 else ids_of(folder, **options)
    for share in (0, 0.5, 0.9):
        loaded, spec, ranks = load(folder, host_memory=budget(folder, share, **options), **options)
        measured = generate(loaded, spec, ranks)
        read = [loop.moved.disk_read_bytes_per_step for loop in measured.loops]
        loaded.close()
        assert torch.equal(measured.output_ids, expected), share
        assert min(read) > 0
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU multiplies the codes of blocks on disk")
@pytest.mark.parametrize(
    "family, bits, share, tolerance",
    [
        ("llama", 4, "auto", 0),
        ("gpt2", 8, "1", 0),
        ("mixtral", 4, "auto", 0.5),
    ],  # tokens decide how many experts are read
)
def test_without_a_gpu_the_cpu_multiplies_codes_in_the_slots(family, bits, share, tolerance, models, tmp_path):
    folder, options = models(family), dict(quant_bits=bits, quant_group_size=16, offload_dir=str(tmp_path))
    plan = plan_of(folder, disk_offload=True, **options)
    placement = plan.placement
    assert placement.computed_in_slots == set(placement.computable) & placement.on_disk and placement.slots_on(0) == 3
    loaded, spec, ranks = load(folder, disk_offload=True, cpu_compute=share, **options)
    measured = generate(loaded, spec, ranks)
    loaded.close()
    assert torch.equal(measured.output_ids, ids_of(folder, **options))
    assert placement.computed_bytes > 0.6 * plan.disk_bytes, "all but norms and routers"
    assert measured.loops[0].moved.cores_bytes_per_step == pytest.approx(placement.computed_bytes, rel=tolerance)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU multiplies the codes of blocks on disk")
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_modules_that_change_are_called_with_weights_in_slots(family, models, tmp_path):
    """As adapters need: the CPU no longer computes a feed-forward or experts as a whole."""
    folder, options = models(family), dict(quant_bits=4, quant_group_size=16, offload_dir=str(tmp_path))
    loaded, spec, ranks = load(folder, disk_offload=True, **options)
    before = generate(loaded, spec, ranks).output_ids
    loaded.modules_changed(set(loaded.model.modules()))
    after = generate(loaded, spec, ranks).output_ids
    loaded.close()
    assert torch.equal(before, after)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_slow_disk_that_answers_in_any_order_keeps_the_ids(family, checkpoints, tmp_path, monkeypatch):
    folder, pread = checkpoints(family), os.preadv

    def slow(file, buffers, offset):
        time.sleep(random.random() * 0.004)
        return pread(file, buffers, offset)

    monkeypatch.setattr(os, "preadv", slow)
    assert torch.equal(ids_of(folder, disk_offload=True, offload_dir=str(tmp_path)), plain_ids(folder, IDS, GEN))


@pytest.mark.parametrize(
    "options",
    [
        dict(devices=2),
        dict(decode_graph="on"),
        dict(kv_offload=True),
        dict(cpu_compute="0.5", share=0.6),
        dict(ring_depth=2),
        dict(gpu_memory=0.0001),
        dict(pin_memory=0),
    ],
    ids=str,
)
def test_together_with_other_options(options, checkpoints, tmp_path):
    folder, options = checkpoints("llama"), dict(options)
    if torch.cuda.is_available() and too_few_gpus(options.get("devices", 1)):
        pytest.skip("needs two GPUs, or none")
    host = budget(folder, options.pop("share", 0.3))
    assert torch.equal(
        ids_of(folder, host_memory=host, offload_dir=str(tmp_path), **options), plain_ids(folder, IDS, GEN)
    )


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3_moe"])
def test_a_checkpoint_is_read_in_place(family, models, tmp_path):
    """Nothing is written, and layers are not read while loading, except those that are compared; experts are fused as they are read."""
    folder = models(family)
    plan = plan_of(folder, disk_offload=True, offload_dir=str(tmp_path / "unused"))
    assert plan.in_place.keys() == plan.placement.on_disk and plan.footprint.disk == 0 < plan.disk_bytes
    assert {extent.path.parent for extents in plan.in_place.values() for extent in extents} == {Path(folder)}
    loaded, spec, ranks = load(folder, disk_offload=True, offload_dir=str(tmp_path / "unused"))
    found = generate(loaded, spec, ranks).output_ids
    loaded.close()
    assert torch.equal(found, plain_ids(folder, IDS, GEN)) and not (tmp_path / "unused").exists()


def test_a_checkpoint_larger_than_memory_is_read(checkpoints, tmp_path, monkeypatch):
    folder, safe_open = checkpoints("llama"), safetensors.safe_open
    expected = plain_ids(folder, IDS, GEN)

    def without_memory(*args, backend: str = "mmap", **more):
        if backend == "mmap":
            raise RuntimeError(
                "unable to mmap 61066787456 bytes from file <model.safetensors>: Cannot allocate memory (12)"
            )
        return safe_open(*args, backend=backend, **more)

    monkeypatch.setattr("safetensors.safe_open", without_memory)
    assert torch.equal(ids_of(folder, disk_offload=True, offload_dir=str(tmp_path)), expected)


@pytest.mark.parametrize(
    "family, options",
    [
        ("gpt2", {}),
        ("llama", dict(quant_bits=4, quant_group_size=16)),
        ("llama", dict(dtype="bfloat16")),
    ],
)
def test_other_weights_are_written_once(family, options, models, tmp_path):
    """Transposed and quantized weights, and those of another dtype: to a file that goes with the run."""
    folder = models(family)
    plan = plan_of(folder, disk_offload=True, offload_dir=str(tmp_path), **options)
    written = plan.placement.on_disk - plan.in_place.keys()
    assert written and plan.footprint.disk == sum(plan.placement.disk_file[block] for block in written)
    loaded, *_ = load(folder, disk_offload=True, offload_dir=str(tmp_path), **options)
    (file,) = tmp_path.glob("*/blocks.bin")
    assert file.stat().st_size == plan.footprint.disk and file.stat().st_mode & 0o077 == 0
    loaded.close()
    assert not list(tmp_path.iterdir())


def resident_pages(path: Path) -> int:
    """Return how many pages of a file are in the page cache."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE) as pages:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype, libc.mmap.argtypes = (
            ctypes.c_void_p,
            [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long],
        )
        address = libc.mmap(None, len(pages), mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
        found = (ctypes.c_ubyte * -(-len(pages) // mmap.PAGESIZE))()
        assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(pages)), found) == 0
        libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(len(pages)))
        return sum(each & 1 for each in found)


def test_the_page_cache_is_not_used(checkpoints, tmp_path):
    folder = checkpoints("llama")
    loaded, spec, ranks = load(folder, disk_offload=True, offload_dir=str(tmp_path), quant_bits=8, quant_group_size=16)
    generate(loaded, spec, ranks)
    (file,) = tmp_path.glob("*/blocks.bin")
    assert resident_pages(file) == 0
    file.read_bytes()
    assert resident_pages(file) > 0  # which the count sees
    loaded.close()


def test_a_thousand_steps_read_what_was_planned_in_steady_memory(checkpoints, tmp_path, monkeypatch):
    monkeypatch.setattr("zero_inference.engines.stream.streams.MAX_EVENTS", 512)
    folder, process = checkpoints("llama"), psutil.Process()
    length = 1000
    options = dict(host_memory=budget(folder, 0.4), offload_dir=str(tmp_path), quant_bits=8, quant_group_size=16)
    loaded, spec, ranks = load(folder, gen_len=length, **options)
    model, ids = loaded.model, IDS[:, :1].to(loaded.device)
    disk_bytes = plan_of(folder, gen_len=length, **options).disk_bytes
    for _ in range(200):  # until the timeline has all the events that it keeps
        model(input_ids=ids, use_cache=False)
    before, read, files = process.memory_info().rss, loaded.transfers.disk_read_bytes, process.num_fds()
    for _ in range(length):
        model(input_ids=ids, use_cache=False)
    assert process.memory_info().rss - before < 8 << 20
    assert process.num_fds() == files
    assert loaded.transfers.disk_read_bytes - read == pytest.approx(length * disk_bytes, rel=0.2)  # in whole pages
    loaded.close()


def test_a_pass_that_failed_does_not_confuse_the_next(checkpoints, tmp_path):
    folder = checkpoints("llama")
    loaded, spec, ranks = load(folder, disk_offload=True, offload_dir=str(tmp_path))
    layer = loaded.model.model.layers[1]
    handle = layer.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loaded.model(input_ids=IDS.to(loaded.device))
    handle.remove()
    assert torch.equal(generate(loaded, spec, ranks).output_ids, plain_ids(folder, IDS, GEN))
    loaded.close()


# Experts


@pytest.mark.parametrize("family, bits", [("mixtral", 16), ("mixtral", 4), ("qwen3_moe", 16), ("gpt_oss", 4)])
def test_host_memory_caches_experts(family, bits, models, tmp_path):
    """With the fewest slots that a pass needs, one more, and two thirds: the ids of weights in memory, and fewer reads with more slots."""
    folder, options = models(family), dict(quant_bits=bits, offload_dir=str(tmp_path))
    if bits < 16:
        options["quant_group_size"] = 16
    expected = plain_ids(folder, IDS, GEN) if bits == 16 else ids_of(folder, cpu_compute="1", **options)
    whole = plan_of(folder, disk_offload=True, **options).placement
    experts = [block for block in range(len(whole.blocks)) if whole.blocks[block].experts is not None]
    number, size = whole.blocks[experts[0]].experts.num_experts, whole.expert_bytes(experts[0])
    others = sum(each.layout.nbytes for each in whole.blocks if each.experts is None) + whole.embedding_bytes
    read = []
    for slots in (number, number + 1, number * len(experts) * 2 // 3):
        host = (others + whole.disk_slots_bytes + slots * size + 1) / GIB
        plan = plan_of(folder, host_memory=host, **options)
        assert plan.placement.host_expert_slots == slots and plan.footprint.host <= host * GIB + 1
        assert plan.placement.cached_on_host == plan.placement.on_disk == set(experts) <= plan.placement.cpu_computed
        loaded, spec, ranks = load(folder, host_memory=host, **options)
        measured = generate(loaded, spec, ranks)
        loaded.close()
        assert torch.equal(measured.output_ids, expected), slots
        use = measured.loops[-1].experts
        assert 0 < use.host_hit_rate <= 1 and use.hit_rate == 0
        read.append(measured.loops[-1].moved.disk_read_bytes_per_step)
    page_bytes = 8 * 2 * 4096  # of whole pages around the tensors of an expert
    assert read[0] >= read[1] >= read[2] and read[0] < len(experts) * number * (size + page_bytes)


def test_the_least_used_experts_are_evicted(models, tmp_path):
    folder = models("qwen3_moe")
    whole = plan_of(folder, disk_offload=True).placement
    blocks = [block for block in range(len(whole.blocks)) if whole.blocks[block].experts is not None]
    placement = replace(whole, host_expert_slots=3)
    loaded, *_ = load(folder, disk_offload=True, cpu_compute="off", offload_dir=str(tmp_path))
    disk, transfers = loaded.weights.store.disk, Transfers()
    host = HostExperts(placement, disk, pinned=False, transfers=transfers)
    size = placement.expert_bytes(blocks[0])

    def on_disk(block: int) -> torch.Tensor:
        data = bytearray(placement.blocks[block].layout.nbytes)
        for path, offset, nbytes, place in map(astuple, disk.extents[block]):
            data[place : place + nbytes] = path.read_bytes()[offset : offset + nbytes]
        return torch.frombuffer(data, dtype=torch.uint8)

    def contents(block: int, expert: int) -> bool:
        """Return whether the slot of an expert has its bytes."""
        (slot,) = host.slots_for(block, [expert]).values()
        layout, stored, buffer = placement.blocks[block].layout, host.block.layout, on_disk(block)
        return all(
            torch.equal(of_block.plain.of(buffer)[expert], own.plain.of(host.buffer)[slot])
            for of_block, own in zip(layout.parameters, stored.parameters)
        )

    one, other = blocks[:2]
    assert contents(one, 0) and contents(one, 1) and contents(other, 3) and (host.choices, host.hits) == (3, 0)
    assert contents(one, 0) and contents(other, 3) and host.hits == 2, "all three are here"
    assert contents(one, 2) and host.slot_of[0, 1] == -1, "expert 1 was used once, the others twice"
    assert contents(one, 1) and transfers.disk_read_bytes >= 5 * size
    assert host.slots_for(one, [0, 1, 2, 0]).keys() == {0, 1, 2} and host.slot_of[1].max() == -1
    assert host.slots_for(one, [0, 4]) == {0: host.slot_of[0, 0], 4: 3}, "a token that has one expert less"
    loaded.close()


# Converted files

IN_16 = "--quant-group-size 16"


@pytest.mark.parametrize(
    "family, options", [("gpt2", ""), ("mixtral", f"--quant-bits 4 {IN_16}"), ("llama", f"--quant-bits 8 {IN_16}")]
)
def test_a_converted_file_is_reused(family, options, models, tmp_path, capfd):
    """By all runs with the same weights, which write nothing, with any budget of host memory."""
    folder, where = models(family), ["--dtype", "float32", "--offload-dir", str(tmp_path)]
    assert console_main(["zero-inference", "convert", str(folder), *where, *options.split()]) == 0
    (file,) = tmp_path.iterdir()
    assert capfd.readouterr().out.strip() == str(file) and file.stat().st_mode & 0o077 == 0
    chosen = dict(zip((word[2:].replace("-", "_") for word in options.split()[::2]), map(int, options.split()[1::2])))
    chosen |= dict(offload_dir=str(tmp_path))
    expected = ids_of(folder, **chosen) if options else plain_ids(folder, IDS, GEN)
    for share in (0, 0.6):
        host = budget(folder, share, **chosen)
        plan = plan_of(folder, host_memory=host, **chosen)
        assert plan.in_place.keys() == plan.placement.on_disk and plan.footprint.disk == 0 < plan.disk_bytes
        assert {extent.path for extents in plan.in_place.values() for extent in extents} == {file}
        assert torch.equal(ids_of(folder, host_memory=host, **chosen), expected)
    assert list(tmp_path.iterdir()) == [file]


def test_a_file_of_other_weights_is_not_used(models, tmp_path, capfd, monkeypatch):
    folder, options = models("gpt2"), dict(disk_offload=True, offload_dir=str(tmp_path / "offload"))
    copied = Path(shutil.copytree(folder, tmp_path / "copied"))
    convert = [
        "zero-inference",
        "convert",
        str(copied),
        "--dtype",
        "float32",
        "--offload-dir",
        str(tmp_path / "offload"),
    ]
    assert console_main(convert) == 0
    file = Path(capfd.readouterr().out.strip())
    assert plan_of(copied, **options).footprint.disk == 0
    for other in (dict(dtype="bfloat16"), dict(quant_bits=8, quant_group_size=16)):
        assert plan_of(copied, **options | other).footprint.disk > 0
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert plan_of(copied, **options).footprint.disk > 0, "another user's"
    content = file.read_bytes()
    os.truncate(file, len(content) // 2)
    assert plan_of(copied, **options).footprint.disk > 0, "half of it, as a full disk leaves it"
    file.write_bytes(content)
    assert plan_of(copied, **options).footprint.disk == 0
    os.utime(next(copied.glob("*.safetensors")), (1, 1))
    assert plan_of(copied, **options).footprint.disk > 0, "the checkpoint has changed"


def test_what_cannot_be_converted(models, tmp_path, capfd):
    where = ["--dtype", "float32", "--offload-dir", str(tmp_path)]
    for options, message in (
        ([str(models("llama")), *where], "runs read its own files as they are"),
        (["--quant-bits", "4"], "name a model first"),
        ([str(models("llama")), "--quant-bits", "auto"], "name them"),
    ):
        assert console_main(["zero-inference", "convert", *options]) == 2
        assert message in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


# The reader


def disk_of(folder: Path, contents: list[bytes], offsets: list[int]) -> DiskBlocks:
    """Return blocks that are at any `offsets` of one file each."""
    extents = {}
    for block, (data, offset) in enumerate(zip(contents, offsets)):
        path = folder / f"{block}.bin"
        path.write_bytes(bytes(offset) + data)
        extents[block] = [Extent(path, offset, len(data))]
    os.sync()
    return DiskBlocks(folder, extents, {}, DirectIO(read_bytes=8192, queue_depth=4))


def taken(reader: DiskReader, block: int) -> bytes:
    """Take all pieces of a block, as a ring buffer does."""
    found, nbytes = b"", reader.disk.block_bytes(block)
    while len(found) < nbytes:
        slot, memory, piece = reader.take(block)
        assert piece.begin == len(found)
        found += memory.numpy().tobytes()
        reader.release(slot)
    return found


def test_blocks_are_read_from_any_offset_and_in_any_order(tmp_path, monkeypatch):
    monkeypatch.setattr("zero_inference.engines.stream.disk.PIECE_BYTES", 20000)
    contents = [os.urandom(size) for size in (1, 4096, 4097, 90000, 12288)]
    disk = disk_of(tmp_path, contents, [0, 8, 4095, 123, 4096])
    reader = DiskReader(range(5), disk, pinned=False, transfers=Transfers())
    for order in ([0, 1, 2, 3, 4, 0], [3, 3, 0], [4, 1], []):  # each stays the last one for ever
        reader.follow(itertools.chain([2], itertools.cycle(order)))
        for block in [2, *order, *order]:
            assert taken(reader, block) == contents[block], block
        if order:
            assert reader.measure_gb_per_s(seconds=0.01) > 0
            assert all(part.done() for read in reader.reads for part in read.parts), "as it was before"
            assert taken(reader, order[0]) == contents[order[0]], "what was measured does not count"
    reader.follow([3], begin=20000)
    assert reader.take(3)[2] == (3, 20000, 40000)
    reader.close()
    disk.close()


@pytest.mark.parametrize("fault", ["changed", "cut short", "touched"])
def test_a_file_that_changes_while_it_is_used_is_an_error(fault, tmp_path):
    disk = disk_of(tmp_path, [os.urandom(30000) for _ in range(5)], [0] * 5)
    reader = DiskReader(range(5), disk, pinned=False, transfers=Transfers())
    reader.follow(itertools.cycle(range(5)))
    path = tmp_path / "4.bin"
    for block in range(4):
        taken(reader, block)
    if fault == "changed":
        with open(path, "r+b") as file:
            file.write(b"other bytes")
    elif fault == "cut short":
        os.truncate(path, 100)
    else:
        os.utime(path, (1, 1))
    with pytest.raises(RunError, match="4.bin: the file has changed while its weights were in use"):
        reader.take(4)
    reader.close()
    disk.close()


def test_a_block_may_be_in_two_files(tmp_path):
    """As layers at the end of a shard are; the second is first read many pieces after the first."""
    contents = [os.urandom(150_000), os.urandom(50_000)]
    for name, data in zip("ab", contents):
        (tmp_path / name).write_bytes(data)
    extents = [Extent(tmp_path / "a", 0, 150_000), Extent(tmp_path / "b", 0, 50_000, 150_000)]
    disk = DiskBlocks(tmp_path, {0: extents}, {}, DirectIO())
    reader = DiskReader([0], disk, pinned=False, transfers=Transfers())
    reader.follow(itertools.cycle([0]))
    assert [taken(reader, 0) for _ in range(2)] == [b"".join(contents)] * 2
    reader.close()
    disk.close()


def test_reads_go_on_after_the_disk_has_failed(tmp_path, monkeypatch):
    contents = [os.urandom(30000) for _ in range(3)]
    disk = disk_of(tmp_path, contents, [0] * 3)
    reader = DiskReader(range(3), disk, pinned=False, transfers=Transfers())
    for _ in range(2 * DISK_SLOTS):
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))
            reader.follow(itertools.cycle(range(3)))
            with pytest.raises(RunError, match="0.bin: could not be read .Input/output error"):
                reader.take(0)
    reader.follow(itertools.cycle(range(3)))
    assert [taken(reader, block) for block in range(3)] == contents
    reader.close()
    disk.close()


def test_a_file_that_is_too_short_is_an_error(tmp_path):
    (tmp_path / "0.bin").write_bytes(os.urandom(30000))
    disk = DiskBlocks(tmp_path, {0: [Extent(tmp_path / "0.bin", 0, 40000)]}, {}, DirectIO())
    reader = DiskReader([0], disk, pinned=False, transfers=Transfers())
    reader.follow([0])
    with pytest.raises(RunError, match="0.bin: could not be read .the file ends at byte 30000.[.]"):
        taken(reader, 0)
    reader.close()
    disk.close()


# The plan


def test_blocks_are_divided_by_the_budget_of_host_memory(checkpoints, tmp_path):
    folder = checkpoints("llama")
    everything = plan_of(folder).placement
    assert not everything.on_disk and everything.disk_slots_bytes == 0
    for share in (0, 0.3, 0.7):
        given = budget(folder, share)
        plan = plan_of(folder, host_memory=given, offload_dir=str(tmp_path))
        placement = plan.placement
        assert {*placement.in_host_memory, *placement.on_disk} == {*placement.offloaded} and placement.on_disk
        assert plan.footprint.host <= given * GIB + 1
        assert placement.host_bytes <= share * placement.nbytes_of(placement.offloaded)
        assert plan.disk_bytes == placement.disk_bytes and not placement.cpu_computed & placement.on_disk
    assert not plan_of(folder, host_memory=1).placement.on_disk


def test_host_memory_that_is_too_small_sends_the_rest_to_disk(tmp_path):
    """Without an option that asks for it; auto weighs it against other engines and fewer bits instead."""
    options = dict(model="llama-2-13b", dummy=True, dtype="bfloat16", offload_dir=str(tmp_path))
    small = Machine(host_limit_bytes=16 * GIB)
    plan = plan_of(machine=small, folder="llama-2-13b", **{k: v for k, v in options.items() if k != "model"})
    assert 0 < plan.placement.disk_bytes < 24 * GIB and plan.footprint.host < 16 * GIB
    assert plan.footprint.disk == plan.placement.disk_bytes
    assert "and on disk" in plan.describe_location() and any("from disk" in line for line in plan.in_words())


def test_an_offload_that_would_do_nothing_is_refused(checkpoints, tmp_path, capfd):
    folder, on_disk = checkpoints("llama"), dict(disk_offload=True, offload_dir=str(tmp_path))
    with pytest.raises(UsageError, match="all weights fit on the device and in --host-memory"):
        plan_of(folder, host_memory=4, **on_disk)
    gpu = "--assume gpus=1x24GiB,host=64GiB,link=25GB/s,memory=900GB/s,disk=2GB/s,disk_free=1TiB --gpu-memory 0"
    asked = "run_model.py --model llama-2-7b --dummy --engine stream --dry-run --disk-offload --cpu-compute 0.5"
    assert main([*asked.split(), *gpu.split()]) == 2
    assert "are on disk; raise --host-memory" in capfd.readouterr().err
    if not torch.cuda.is_available():  # then the CPU multiplies weights in the slots
        assert torch.equal(ids_of(folder, cpu_compute="0.5", **on_disk), plain_ids(folder, IDS, GEN))


@pytest.mark.parametrize("model, bits", [("qwen3-30b-a3b", 16), ("mixtral-8x7b", 4), ("llama-3.1-70b", 4)])
@pytest.mark.parametrize("host", [8, 20, 40])
def test_plans_for_a_gpu(model, bits, host, capfd):
    """No share of the CPU is more than all of it, budgets are kept, and no disk is used where the GPU and host memory hold everything."""
    asked = f"--model {model} --dummy --engine stream --quant-bits {bits} --dry-run --json --host-memory {host} --gpu-memory"
    machine = "--assume gpus=1x80GiB,host=128GiB,link=50GB/s,memory=3TB/s,matmul=700TFLOP/s,cores=90GB/s,disk=2GB/s,disk_free=1TiB"
    for gpu in (4, 40):
        assert main(["run_model.py", *asked.split(), str(gpu), *machine.split()]) == 0
        plan = json.loads(capfd.readouterr().out)
        needed = {each["place"]: each["needed_bytes"] for each in plan["needs"]}
        weights, read = plan["sizes"]["weight_bytes"], plan["moved_per_step"]["disk_read_bytes_per_step"]
        on_disk = needed.get("disk", 0)
        assert needed["host memory"] <= host * GIB and 0 <= read <= on_disk
        assert on_disk >= weights - (host + gpu + 4) * GIB, (
            "beside them the device has the head and what is read outside of layers"
        )
        assert (on_disk > 0) <= (weights > (host + gpu - 2) * GIB), "slots, and what is left where no block fits"
        assert plan["predicted"]["decode_step_s"] >= read / 2e9


# Faults of the offload folder


def test_a_full_disk_is_found_before_weights_are_read(checkpoints, tmp_path):
    folder = checkpoints("llama")
    with small_disk(tmp_path / "small", "100k") as small:
        options = dict(disk_offload=True, offload_dir=str(small), quant_bits=8, quant_group_size=16)
        with pytest.raises(UsageError, match="is needed and .* is free; choose another folder"):
            load(folder, **options)
        assert not list(small.iterdir())


def test_a_disk_that_fills_up_while_weights_are_written(checkpoints, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with small_disk(tmp_path / "small", "100k") as small:
        options = dict(disk_offload=True, offload_dir=str(small), quant_bits=8, quant_group_size=16)
        with pytest.raises(RunError, match="the offload folder has no space for .* more"):
            load(checkpoints("llama"), **options)
        assert not list(small.iterdir())


def test_a_checkpoint_that_has_no_direct_reads_is_written(checkpoints, tmp_path, monkeypatch):
    folder, real = checkpoints("llama"), os.open

    def refuse(path, flags, *more, **others):
        if flags & os.O_DIRECT and str(path).endswith(".safetensors"):
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *more, **others)

    monkeypatch.setattr(os, "open", refuse)
    plan = plan_of(folder, disk_offload=True, offload_dir=str(tmp_path))
    assert not plan.in_place and plan.footprint.disk > 0
    found = ids_of(folder, disk_offload=True, offload_dir=str(tmp_path))
    assert torch.equal(found, plain_ids(folder, IDS, GEN))


def test_a_load_that_cannot_read_leaves_the_model_as_it_was(checkpoints, tmp_path, monkeypatch):
    folder = checkpoints("llama")
    config = RunConfig(
        model=str(folder), engine="stream", gpu_memory=0, disk_offload=True, offload_dir=str(tmp_path), dtype="float32"
    )
    ranks = detect_ranks()
    plan = make_plan(build_job(config.validate(), resolve_model(config, ranks.device.type), ranks))
    monkeypatch.setattr(os, "preadv", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))
    monkeypatch.setattr(DiskReader, "is_read", lambda self: True)  # as on a disk that has answered at once
    files = psutil.Process().num_fds()
    with pytest.raises(RunError, match="could not be read"):
        plan.load()
    layers = plan.job.empty_model.model.model.layers
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in layers.modules())
    assert psutil.Process().num_fds() == files


def test_runs_do_not_touch_each_others_files(checkpoints, tmp_path):
    folder, options = (
        checkpoints("llama"),
        dict(disk_offload=True, offload_dir=str(tmp_path), quant_bits=8, quant_group_size=16),
    )
    expected = ids_of(folder, quant_bits=8, quant_group_size=16)
    other = OffloadWorkspace(tmp_path)
    first, spec, ranks = load(folder, **options)
    second, *_ = load(folder, **options)
    assert len(list(tmp_path.glob("*/blocks.bin"))) == 2
    assert torch.equal(generate(first, spec, ranks).output_ids, expected)
    first.close()
    assert torch.equal(generate(second, spec, ranks).output_ids, expected)
    second.close()
    assert list(tmp_path.iterdir()) == [other.path]
    other.close()
