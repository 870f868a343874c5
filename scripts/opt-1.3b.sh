#!/bin/sh
# OPT-1.3B: 2.4 GiB in fp16; 0.19 MiB of KV cache a token.
# Further arguments are sweep.py's and replace those here (--batch-size 4, --dummy, --list); after a -- run_model.py's.
exec "${PYTHON:-python3}" "$(dirname "$0")/sweep.py" --model facebook/opt-1.3b \
    --offload cpu disk --quant-bits 16 8 4 --kv-offload 0 1 --batch-size 1 8 32 128 "$@"
