#!/bin/sh
# OPT-66B: 122 GiB in fp16; 2.3 MiB of KV cache a token, 38 GiB at batch 32.
# Further arguments are sweep.py's and replace those here (--batch-size 4, --dummy, --list); after a -- run_model.py's.
exec "${PYTHON:-python3}" "$(dirname "$0")/sweep.py" --model facebook/opt-66b \
    --offload cpu disk --quant-bits 16 8 4 --kv-offload 0 1 --batch-size 1 8 32 "$@"
