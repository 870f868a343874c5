"""The deepspeed engine: what it gathers against DeepSpeed's own coordinator, libaio under Ctrl-C, and its compiled modules.

What it computes is in test_tokens.py."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import test_machine
import torch
from conftest import FAMILIES, start_python, without_gpus
from forks import PROGRAM
from test_machine import MACHINE

from zero_inference.config.run_config import RunConfig
from zero_inference.engines.deepspeed import engine, modules
from zero_inference.engines.deepspeed import plan as deepspeed_plan
from zero_inference.errors import UsageError
from zero_inference.hardware.machine import Machine
from zero_inference.measure.engine_overhead import _ThinModel
from zero_inference.models.spec import resolve_model
from zero_inference.planning.make_plan import plan_run
from zero_inference.utils.files import EXTENSIONS
from zero_inference.utils.ranks import detect_ranks, start_process_group

LIVE = "_PartitionedParameterCoordinator__n_available_params"


def planned(**options):
    config = RunConfig(dummy=True, dtype="bfloat16", engine="deepspeed", **options).validate()
    ranks = detect_ranks()
    start_process_group(ranks)
    return plan_run(config, resolve_model(config, ranks.device.type), ranks)


@pytest.fixture
def simulated(monkeypatch) -> list[int]:
    """Gathered bytes of each module of the last plan, which counts them for GPUs or several ranks alone."""
    found, simulate = [], deepspeed_plan.simulate_fetches

    def recorded(*args):
        found[:] = simulate(*args)
        return found

    monkeypatch.setattr(deepspeed_plan, "simulate_fetches", recorded)
    return found


@pytest.mark.parametrize("family, bits", [("opt", 16), ("llama", 8), ("gpt_neox", 4)])  # OPT's head is its embedding
def test_deepspeed_fetches_as_far_ahead_as_was_planned(family, bits, checkpoints, simulated, monkeypatch):
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator as Coordinator

    quantized = {"quant_bits": bits, "quant_group_size": 32} if bits < 16 else {}
    plan = planned(model=str(checkpoints(family)), cpu_offload=True, **quantized)
    live, fetch = [], Coordinator.fetch_sub_module

    def recorded(self, module, forward):
        fetch(self, module, forward)
        live.append(getattr(self, LIVE))

    monkeypatch.setattr(Coordinator, "fetch_sub_module", recorded)
    loaded = plan.load()
    try:
        for _ in range(3):  # the coordinator knows the order from the second pass on
            live.clear()
            with torch.no_grad():
                loaded.model(input_ids=torch.zeros(1, 4, dtype=torch.int64), use_cache=False)
    finally:
        loaded.close()
    itemsize = plan.job.spec.dtype.itemsize
    assert max(simulated) == itemsize * max(live) > 0
    assert set(simulated) == {itemsize * each for each in live}


def test_a_head_is_fetched_beside_the_layers_that_the_limit_allows(simulated):
    """The limit is compared before a parameter is taken, and a head is larger than two layers of a 70B model."""
    plan = planned(model="llama-3.1-70b", cpu_offload=True, quant_bits=8)
    limit = 2 * plan.engine_plan.ds_config["zero_optimization"]["stage3_max_live_parameters"]
    largest = 128256 * 8192 * (1 + 4 / 64)
    assert limit + 0.7 * largest < max(simulated) < limit + largest


def test_without_a_gpu_a_rank_keeps_what_it_dequantized_and_gathers_nothing():
    peaks = planned(model="opt-125m", cpu_offload=True, quant_bits=8).engine_plan.memory.peaks
    assert {peak.nbytes for peak in peaks} == {2 * 50272 * 768} and (peaks[0].layers, peaks[-1].layers) == (0, 12)


INTERRUPTED = """
import signal
import sys
import psutil
import torch
from deepspeed.runtime.swap_tensor import partitioned_param_swapper as swapping
from zero_inference import load

OPTIONS = dict(engine="deepspeed", dummy=True, disk_offload=True, offload_dir=sys.argv[2], dtype="float32", verbose=0)

def tokens():
    with load(sys.argv[1], **OPTIONS) as model:
        return model.generate(torch.arange(8)[None], max_new_tokens=3, do_sample=False).tolist()

def requests(name, interrupted=None):
    \"\"\"Return the number of requests. Ctrl-C comes right after that of number `interrupted`, before DeepSpeed has counted it.\"\"\"
    request, calls = getattr(swapping, name), []
    def requested(*arguments):
        request(*arguments)
        calls.append(1)
        if len(calls) == interrupted:
            signal.raise_signal(signal.SIGINT)
    setattr(swapping, name, requested)
    try:
        tokens()
        assert interrupted is None, "Ctrl-C had no effect"
    except KeyboardInterrupt:
        pass
    finally:
        setattr(swapping, name, request)
    return len(calls)

expected, reads = tokens(), requests("swap_in_tensors")
taken = psutil.Process().memory_info().rss
requests("swap_out_tensors", 2)
requests("swap_in_tensors", 1)
requests("swap_in_tensors", reads)  # ahead, while layers compute
assert tokens() == expected
more = psutil.Process().memory_info().rss - taken
assert more < 64 << 20, f"{more} bytes were not given back"
print("as before")
"""
# In matrices of at least 1 MiB, which DeepSpeed keeps on disk.
ON_DISK = FAMILIES["llama"] | dict(hidden_size=512, intermediate_size=1024, num_hidden_layers=4)


@pytest.mark.slow
def test_reads_and_writes_end_before_their_handles_are_deleted(fork_server, tmp_path):
    """Otherwise libaio would abort the process."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(ON_DISK))
    script, out, err = (tmp_path / name for name in ("script.py", "out", "err"))
    script.write_text(INTERRUPTED)
    command = [script, tmp_path / "model", tmp_path / "offload"]
    process = start_python(fork_server(PROGRAM), command, tmp_path, out, err, without_gpus())
    assert process.wait(timeout=240) == 0, err.read_text()
    assert out.read_text().endswith("as before\n") and not any((tmp_path / "offload").iterdir())


class Builder:
    """As one of DeepSpeed's: compiles as torch does, into TORCH_EXTENSIONS_DIR, and notes the folder."""

    name = "quantizer"

    def __init__(self, error: Exception | None = None):
        self.error, self.cxx_args = error, list

    def load(self, verbose: bool) -> None:
        self.folder = Path(os.environ["TORCH_EXTENSIONS_DIR"], self.name)
        (self.folder / f"{self.name}.o").write_text("half")
        if self.error:
            raise self.error
        (self.folder / f"{self.name}.so").touch()


@pytest.mark.parametrize("ours", [True, False])
def test_a_module_is_compiled_in_a_folder_that_is_moved_into_place_when_complete(ours, monkeypatch, tmp_path):
    extensions = tmp_path / EXTENSIONS if ours else tmp_path
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(extensions))
    extensions.mkdir(parents=True, exist_ok=True)
    kept = extensions / "quantizer"
    (extensions / ".building-quantizer-killed").mkdir()
    with pytest.raises(RuntimeError):
        modules._load(Builder(RuntimeError("Error building extension")), kept)
    assert not list(extensions.glob(".building-*")) and not kept.exists()
    first, second = Builder(), Builder()
    modules._load(first, kept)
    modules._load(second, kept)
    assert first.folder != kept and second.folder == kept
    assert sorted(path.name for path in kept.iterdir()) == ["quantizer.o", "quantizer.so"]
    assert os.environ["TORCH_EXTENSIONS_DIR"] == str(extensions)


def test_without_a_compiler_the_error_names_what_to_install(monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    with pytest.raises(UsageError, match=r"module has to be compiled here: no C\+\+ compiler.*apt install g\+\+"):
        modules.check_compilers(True, False, False)
    with pytest.raises(UsageError, match=r"reads NVMe: no C\+\+ compiler.*apt install g\+\+"):
        modules.check_aio(False)


def test_libaio_is_found_where_stderr_has_no_file_descriptor(monkeypatch):
    """As in some notebooks; DeepSpeed's probe duplicates the descriptor."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    monkeypatch.setattr(AsyncIOBuilder, "is_compatible", lambda self, verbose: sys.stderr.fileno() >= 0)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    modules.check_aio(False)


@pytest.mark.parametrize("compiled", [True, False])
def test_dequantizing_is_measured_in_both_dtypes_of_a_gpu(compiled, monkeypatch, capfd):
    rates, built = {torch.bfloat16: 141.0, torch.float16: 1300.0}, []

    def build(disk, use_gds, dequantize_on_gpu, say):
        built.append((disk, dequantize_on_gpu))
        if not compiled:
            raise RuntimeError("no nvcc")

    monkeypatch.setattr(engine, "build_modules", build)
    monkeypatch.setattr(engine, "measure_dequantized_gb_per_s", lambda settings, dtype, device: rates[dtype])
    monkeypatch.setattr(_ThinModel, "fastest_s", lambda self, warmup: (0.2, 0.1))
    plan = test_machine.planned(
        "--model opt-125m --dummy --dtype bfloat16 --cpu-offload --quant-bits 4", Machine(MACHINE)
    )
    on_gpu = SimpleNamespace(device=torch.device("cuda"))
    thin = _ThinModel(plan, on_gpu, 0.0, units=1, resident=False, launches=1, dequantized_weights=0)
    found = thin.overhead_over(thin)
    assert found.dequantized_gb_per_s == 141.0 and built == [(False, True)]
    assert found.dequantized_float16_gb_per_s == (1300.0 if compiled else None)
    assert ("deepspeed, 4 bits, float16: no nvcc" in capfd.readouterr().err) == (not compiled)
