#!/usr/bin/env bash
# Runs a core part of the tests with other versions of packages than the pinned ones, or with another Python.
#   scripts/versions.sh [NAME==VERSION ...]     scripts/versions.sh transformers==5.17.0
# The packages named are installed into an environment of their own, which finds everything else in that of PYTHON and is removed
# afterwards; torch stays what it is there.
#   PYTHON   interpreter whose environment has the other packages   (.venv/bin/python)
#   TESTS    files in tests/ to run                                 (those below)
#   SELECT   pytest's -k for them      (not disk and not ranks: DeepSpeed would compile its modules anew for each environment)
# Without torch only what needs none is tested: the log, records and reports. The last line says what was tested with what; the
# table in docs/install.md holds what was seen.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON="${PYTHON:-.venv/bin/python}"
core="test_tokens test_prompts test_norms_patch test_presets test_quantized_checkpoints"
without_torch="test_structure test_report test_damaged_records"

venv="$(mktemp -d)"
trap 'rm -rf "$venv"' EXIT
"$PYTHON" -m venv --without-pip "$venv"
"$PYTHON" -c 'import sys; print("\n".join(path for path in sys.path if path.endswith("-packages")))' \
    >"$(echo "$venv"/lib/python*/site-packages)/outer.pth"
python="$venv/bin/python"
if torch="$("$python" -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))' 2>/dev/null)"; then
    tests="${TESTS:-$core}"
else
    tests="${TESTS:-$without_torch}"
fi
echo "$torch" >"$venv/constraints.txt"
[ $# -eq 0 ] || "$python" -m pip --disable-pip-version-check install -q -c "$venv/constraints.txt" "$@"

files=()
for name in $tests; do
    [ ! -f "tests/${name%.py}.py" ] || files+=("tests/${name%.py}.py")
done
code=0
PYTHONPATH="$PWD" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" HF_HUB_OFFLINE=1 "$python" -m pytest -q -k "${SELECT:-not disk and not ranks}" "${files[@]}" || code=$?
"$python" - "$code" <<'EOF'
import importlib.metadata as metadata
import platform
import sys

found = [f"Python {platform.python_version()}"]
for name in ("torch", "transformers", "deepspeed", "accelerate", "numpy", "pandas", "huggingface-hub"):
    try:
        found.append(f"{name} {metadata.version(name)}")
    except metadata.PackageNotFoundError:
        found.append(f"no {name}")
print("passed with" if sys.argv[1] == "0" else "FAILED with", ", ".join(found))
EOF
exit "$code"
