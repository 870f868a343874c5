# Each target works alone on a fresh machine: it makes .venv and installs what it needs.
# PYTHON picks the interpreter for .venv:  make setup PYTHON=python3.12

PYTHON ?= python3
VENV   := .venv
STAMP  := $(VENV)/.complete

# The deepspeed launcher looks for programs (ninja, python) on PATH. Not exported to setup,
# where `python3` has to mean the machine's and not that of a half-made .venv.
IN_VENV := PATH="$(CURDIR)/$(VENV)/bin:$$PATH"

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all lint format docs

help:
	@echo "make setup   make .venv and install everything into it"
	@echo "make demo    generate with a small real model, weights offloaded to host memory"
	@echo "make test    run the tests, but for the slow ones"
	@echo "make test-all  run all tests"
	@echo "make lint    check the layout of the code, likely bugs and types; changes nothing"
	@echo "make format  lay the code out, and fix what can be fixed by a tool"
	@echo "make docs    build the documentation as a site in site/"
	@echo "PYTHON=...   the Python 3.11 or newer to make .venv with (now: $(PYTHON))"

# setup.sh writes the stamp last, so an interrupted set-up is run again.
$(STAMP): requirements.txt requirements-dev.txt pyproject.toml $(wildcard setup.py) scripts/setup.sh
	@PYTHON="$(PYTHON)" VENV="$(VENV)" bash scripts/setup.sh

setup: $(STAMP)

# --num_gpus 1 starts exactly one rank on every machine. Without it deepspeed starts one
# rank per GPU or, where there is none, one per NUMA node; --num_accelerators is the same
# option. No hostfile is read (/job/hostfile would spread the demo over a cluster).
# Where no GPU can be found, deepspeed is told so, and does not warn of it.
NO_GPU := $(if $(wildcard /dev/nvidiactl /dev/dxg /dev/kfd),,DS_ACCELERATOR=cpu)
demo: $(STAMP)
	@echo "demo: smollm2-135m, weights in host memory, one prompt, 20 new tokens"
	@$(IN_VENV) $(NO_GPU) $(VENV)/bin/deepspeed --hostfile /dev/null --num_gpus 1 --log_level error run_model.py --model smollm2-135m \
		--cpu-offload --prompt "A year has twelve months: January, February," --gen-len 20

# All that is wrong is shown at once.
CUDA := $(shell find csrc -name '*.cu' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.h') $(wildcard benchmarks/*.cu)
lint: $(STAMP)
	@echo "lint: ruff, clang-format, mypy"
	@$(IN_VENV); export PATH; wrong=0; \
	ruff check --quiet --output-format concise . || wrong=1; \
	ruff format --quiet --check . || wrong=1; \
	clang-format --dry-run -Werror $(CUDA) || wrong=1; \
	mypy --no-error-summary || wrong=1; \
	[ $$wrong = 0 ] || echo "lint: 'make format' lays the code out; what remains then is to be fixed by hand" >&2; \
	exit $$wrong

format: $(STAMP)
	@$(IN_VENV); export PATH; \
	ruff check --quiet --fix-only .; ruff format . && clang-format -i $(CUDA)

# Pages that follow from the code are written first. --strict: a broken link or a page that is missing from the menu is an error.
docs: $(STAMP)
	@echo "docs: options.md and record.md from the code, then the site"
	@$(VENV)/bin/python scripts/generate_docs.py
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict --quiet --clean
	@echo "docs: open site/index.html; for the search as well: python3 -m http.server -d site"

# The tests start real runs in processes of their own and often wait: three files at a time, one thread each. Bytecode is cached even
# where the environment says otherwise: each of those processes would compile the package again.
PYTEST = $(IN_VENV) OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(VENV)/bin/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder
test: $(STAMP)
	@echo "test: pytest, three files at a time, without the slow tests"
	@$(PYTEST) -m "not slow"

test-all: $(STAMP)
	@echo "test-all: pytest, three files at a time"
	@$(PYTEST)
