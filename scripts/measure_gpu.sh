#!/usr/bin/env bash
# Measures the engines and their peers on CUDA GPUs with random weights, and leaves log, records and tables.
# usage: scripts/measure_gpu.sh RESULT_DIR [CASE ...]      (all cases without names; needs about 80 GB of free host memory,
#                                                           llama405b-int4-stream 128 GiB and a GPU of 140 GB)
#   KV_PEER=1    also time transformers' own offloaded KV cache beside ours
#   LAUNCH=...   how to start a run, such as "deepspeed --num_gpus 2" (default: python3)
#   EXTRA=...    options for every case
set -uo pipefail
results=${1:?usage: measure_gpu.sh RESULT_DIR [CASE ...]}; shift
cd "$(dirname "$0")/.."
mkdir -p "$results"
launch=${LAUNCH:-python3}
declare -A cases=(
  [opt13b-fp16]="--model facebook/opt-13b --cpu-offload --batch-size 8 --prompt-len 128"
  [opt13b-int4]="--model facebook/opt-13b --cpu-offload --quant-bits 4 --batch-size 8 --prompt-len 128"
  [opt13b-int8]="--model facebook/opt-13b --cpu-offload --quant-bits 8 --batch-size 8 --prompt-len 128"
  [opt13b-pageable]="--model facebook/opt-13b --cpu-offload --pin-memory 0 --batch-size 8 --prompt-len 128 --gen-len 9 --loops 1"
  [opt13b-accelerate]="--model facebook/opt-13b --engine accelerate --cpu-offload --batch-size 8 --prompt-len 128 --loops 1 --warmup 0"
  [opt13b-resident]="--model facebook/opt-13b --engine resident --batch-size 8 --prompt-len 128"
  [opt13b-kv]="--model facebook/opt-13b --cpu-offload --kv-offload --pin-kv-cache --async-kv-offload --batch-size 64 --prompt-len 512"
  [opt13b-disk]="--model facebook/opt-13b --disk-offload --batch-size 8 --prompt-len 128 --gen-len 4 --loops 1 --warmup 1"
  [opt13b-int4-prefetch_2hh]="--model facebook/opt-13b --cpu-offload --quant-bits 4 --batch-size 8 --prompt-len 128 --ds-config benchmarks/ds_configs/prefetch_2hh.json"
  [opt13b-int4-no_persistent]="--model facebook/opt-13b --cpu-offload --quant-bits 4 --batch-size 8 --prompt-len 128 --ds-config benchmarks/ds_configs/no_persistent.json"
  [opt30b-int4]="--model facebook/opt-30b --cpu-offload --quant-bits 4 --batch-size 24 --prompt-len 512"
  [opt30b-fp16]="--model facebook/opt-30b --cpu-offload --batch-size 24 --prompt-len 512"
  [opt13b-fp16-stream]="--model facebook/opt-13b --engine stream --gpu-memory 0 --batch-size 8 --prompt-len 128 --trace $results/opt13b-fp16-stream.trace.json"
  [opt13b-int8-stream]="--model facebook/opt-13b --engine stream --gpu-memory 0 --quant-bits 8 --batch-size 8 --prompt-len 128"
  [opt13b-int4-stream]="--model facebook/opt-13b --engine stream --gpu-memory 0 --quant-bits 4 --batch-size 8 --prompt-len 128 --trace $results/opt13b-int4-stream.trace.json"
  [opt13b-kv-stream]="--model facebook/opt-13b --engine stream --gpu-memory 0 --kv-offload --pin-kv-cache --async-kv-offload --batch-size 64 --prompt-len 512"
  [opt30b-half-stream]="--model facebook/opt-30b --engine stream --gpu-memory 28 --batch-size 24 --prompt-len 512"
  [opt30b-resident]="--model facebook/opt-30b --engine resident --batch-size 24 --prompt-len 512"
  [llama70b-int4-stream]="--model meta-llama/Llama-3.1-70B --engine stream --gpu-memory 0 --quant-bits 4 --batch-size 32 --prompt-len 512"
  [llama8b-prefill-norms_off]="--model meta-llama/Llama-3.1-8B --engine resident --norm-kernels off --batch-size 8 --prompt-len 2048 --gen-len 2"
  [llama8b-prefill-norms_cuda]="--model meta-llama/Llama-3.1-8B --engine resident --norm-kernels cuda --batch-size 8 --prompt-len 2048 --gen-len 2"
  [llama405b-int4-stream]="--model meta-llama/Llama-3.1-405B --engine stream --quant-bits 4 --batch-size 32 --prompt-len 128 --gen-len 8 --loops 1 --warmup 1"
)
order=(opt13b-resident opt13b-fp16 opt13b-int8 opt13b-int4 opt13b-kv opt13b-fp16-stream opt13b-int8-stream opt13b-int4-stream opt13b-kv-stream
       opt30b-int4 opt30b-fp16 opt30b-half-stream llama70b-int4-stream opt13b-pageable opt13b-accelerate opt13b-disk)
[ $# -gt 0 ] && order=("$@")
failed=0
for name in "${order[@]}"; do
  echo "== $name" >&2
  # the options come last, so that a case may lower the loops
  # shellcheck disable=SC2086
  $launch run_model.py --dummy --gen-len 32 --loops 2 --warmup 1 --log-file "$results/$name.log" ${cases[$name]} ${EXTRA:-} || failed=1
done
if [ -n "${KV_PEER:-}" ]; then
  echo "== transformers' offloaded cache" >&2
  python3 benchmarks/kv_cache_peer.py --model facebook/opt-13b --dummy --cpu-offload --batch-size 64 --prompt-len 512 --gen-len 12 \
    --loops 1 --warmup 1 --verbose 0 | tee "$results/kv_cache_peer.txt" || failed=1
fi
python3 -m zero_inference report "$results" --format md > "$results/table.md" && cat "$results/table.md"
exit $failed
