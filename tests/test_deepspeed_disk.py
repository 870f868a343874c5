"""What DeepSpeed has libaio read or write when somebody presses Ctrl-C: it aborts the process where a handle goes before it is done."""

from __future__ import annotations

import json

from conftest import FAMILIES, start_python, without_gpus
from forks import PROGRAM

SCRIPT = """
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
    \"\"\"How many requests there are. Right behind that of this number, when DeepSpeed has not counted it yet, comes Ctrl-C.\"\"\"
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
MODEL = FAMILIES["llama"] | dict(hidden_size=512, intermediate_size=1024, num_hidden_layers=4)


def test_reads_and_writes_end_before_their_handles_go(fork_server, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL))
    script, out, err = (tmp_path / name for name in ("script.py", "out", "err"))
    script.write_text(SCRIPT)
    command = [script, tmp_path / "model", tmp_path / "offload"]
    process = start_python(fork_server(PROGRAM), command, tmp_path, out, err, without_gpus())
    assert process.wait(timeout=240) == 0, err.read_text()
    assert out.read_text().endswith("as before\n") and not any((tmp_path / "offload").iterdir())
