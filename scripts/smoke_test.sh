#!/usr/bin/env bash
# Tries an installed zero-inference in an empty folder: commands, presets, a small run on the CPU, the norms, a report. Needs no network.
#   PYTHON     the interpreter that it is installed for (python3)
#   UNWANTED   a folder that no module may come from, such as a checkout (none)
set -euo pipefail
PYTHON="$(command -v "${PYTHON:-python3}")"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
cd "$work"
unset PYTHONPATH
export HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES= DS_ACCELERATOR=cpu

step() { echo "smoke test: $*"; }
program="$(dirname "$PYTHON")/zero-inference"

step "the program and its help"
"$program" --help >help.txt
grep -q plan help.txt

step "norms, and every data file of the package"
"$PYTHON" - <<'EOF'
import os, sys
from pathlib import Path
import torch
import zero_inference
from zero_inference.hardware.spec import TABLE
from zero_inference.models.built_in import PRESET_FOLDER
from zero_inference.norms import rms_norm
from zero_inference.report.page import FOLDER
from zero_inference.kernels.extension import source_folder, sources

x = torch.arange(1.0, 8.0).repeat(2, 1)
right = x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
torch.testing.assert_close(rms_norm(x, torch.ones(7), 1e-6), right)
assert TABLE.is_file() and len(list(PRESET_FOLDER.glob("*.json"))) > 20
assert all((FOLDER / name).is_file() for name in ("page.html", "page.css", "page.js"))
assert source_folder().parent == Path(zero_inference.__file__).parent, source_folder()
assert sources() and list((source_folder() / "cpu").glob("*.cpp"))
unwanted = os.environ.get("UNWANTED")
seen = [m.__file__ for m in sys.modules.values() if getattr(m, "__file__", None) and "zero_inference" in m.__file__]
assert seen and not (unwanted and [file for file in seen if file.startswith(os.path.join(unwanted, ""))]), seen
print("smoke test: zero-inference is in", os.path.dirname(zero_inference.__file__))
EOF

step "a plan for another machine"
"$program" plan --model llama-3.1-70b --dummy --quant-bits 4 --batch-size 1 --engine stream \
    --assume gpus=1x24GiB,host=128GiB,link=25GB/s,memory=900GB/s >plan.txt
grep -q stream plan.txt

step "a run, whose record is reported"
"$program" run --model opt-125m --dummy --engine stream --prompt-len 8 --gen-len 2 --loops 1 --warmup 0 >run.txt
grep -q "record: logs/stream-opt-125m" run.txt
"$program" report logs --format csv --html page.html >table.csv
grep -q opt-125m table.csv && grep -q "<html" page.html
step "passed"
