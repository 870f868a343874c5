#!/bin/sh
# OPT-175B: 325 GiB in fp16; 4.5 MiB of KV cache a token, 38 GiB at batch 16. Not on the hub, so random weights.
# Further arguments are sweep.py's and replace those here (--batch-size 4, --dummy, --list); after a -- run_model.py's.
exec "${PYTHON:-python3}" "$(dirname "$0")/sweep.py" --model facebook/opt-175b \
    --offload cpu disk --quant-bits 16 8 4 --kv-offload 0 1 --batch-size 1 8 16 --dummy "$@"
