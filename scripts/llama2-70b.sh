#!/bin/sh
# Llama-2-70B: 128 GiB in fp16; 0.31 MiB of KV cache a token (8 KV heads), 16 GiB at batch 96.
# Further arguments are sweep.py's and replace those here (--batch-size 4, --dummy, --list); after a -- run_model.py's.
exec "${PYTHON:-python3}" "$(dirname "$0")/sweep.py" --model meta-llama/Llama-2-70b-hf \
    --offload cpu disk --quant-bits 16 8 4 --kv-offload 0 1 --batch-size 1 8 32 96 "$@"
