#!/usr/bin/env bash
# The steps of the images in Dockerfile, which tests/test_packaging.py follows without Docker as far as it can.
#   docker/install.sh system     Debian's or Ubuntu's packages, as root
#   docker/install.sh python     a virtual environment with the package and all that it needs
# Variables:
#   VENV         the environment (/opt/venv)
#   PYTHON       the interpreter to make it with (python3)
#   PACKAGE      what is installed at last: a folder with the sources, or a wheel (.)
#   TORCH_INDEX  package index for torch, such as PyTorch's own of CPU builds (pip's default index)
# pip's own variables hold as always.
set -euo pipefail
requirements="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/requirements.txt"
export VENV="${VENV:-/opt/venv}"

system() {
    export DEBIAN_FRONTEND=noninteractive
    apt-get -qq update
    # g++ compiles the CPU kernels at first use, libaio reads NVMe, bubblewrap isolates HumanEval's programs,
    # Python's headers are for DeepSpeed's modules
    apt-get -qq install -y --no-install-recommends g++ libaio-dev bubblewrap
    command -v python3 >/dev/null && python3 -c 'import ensurepip, venv, sysconfig, os
assert os.path.exists(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null ||
        apt-get -qq install -y --no-install-recommends python3 python3-venv python3-dev
    rm -rf /var/lib/apt/lists/*
}

pip() { "$VENV/bin/python" -m pip --disable-pip-version-check --no-cache-dir "$@"; }

python() {
    export PATH="$VENV/bin:$PATH"  # torch looks there for ninja
    [ -x "$VENV/bin/python" ] || "${PYTHON:-python3}" -m venv "$VENV"
    pip install -q ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$(grep '^torch==' "$requirements")"
    grep -v '^deepspeed' "$requirements" >"$VENV/requirements-without-deepspeed.txt"
    pip install -q -r "$VENV/requirements-without-deepspeed.txt"
    # Its setup.py imports the torch just installed; its own kernels are compiled at first use.
    DS_BUILD_OPS=0 pip install -q --no-build-isolation -r "$requirements"
    pip install -q --ignore-installed --no-deps --no-build-isolation "${PACKAGE:-.}"
}

case "${1:-}" in
    system | python) "$1" ;;
    *) echo "usage: docker/install.sh system|python" >&2; exit 2 ;;
esac
