#!/bin/sh
# BLOOM-176B: 328 GiB in fp16; 3.8 MiB of KV cache a token, 33 GiB at batch 16.
# Further arguments are sweep.py's and replace those here (--batch-size 4, --dummy, --list); after a -- run_model.py's.
exec "${PYTHON:-python3}" "$(dirname "$0")/sweep.py" --model bigscience/bloom \
    --offload cpu disk --quant-bits 16 8 4 --kv-offload 0 1 --batch-size 1 8 16 "$@"
