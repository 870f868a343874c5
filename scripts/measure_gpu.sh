#!/usr/bin/env bash
# Measures the engines and their peers on CUDA GPUs with random weights, and leaves logs, records, tables and traces.
# usage: scripts/measure_gpu.sh RESULT_DIR [CASE ...]
#   without names: every case that one GPU can do, which takes about 20 minutes, 100 GiB of free host memory and, for
#   llama405b-int4-stream, a GPU of 140 GB. `scripts/measure_gpu.sh --list` shows the cases and their commands.
#   LAUNCH=...   how to start a run, such as "deepspeed --num_gpus 2" (default: python3)
#   EXTRA=...    options for every run of a model
#   LIMIT_S=...  starts no case after so many seconds, and says what is left (default: no limit)
#   CASE_S=...   ends a case after so many seconds (default: 600)
# Exit code: 1 if a case failed.
set -uo pipefail
small="--batch-size 8 --prompt-len 128"
thirteen="--model facebook/opt-13b $small"
declare -A runs=(
  [opt13b-resident]="$thirteen --engine resident"
  [opt13b-fp16]="$thirteen --cpu-offload"
  [opt13b-int8]="$thirteen --cpu-offload --quant-bits 8"
  [opt13b-int4]="$thirteen --cpu-offload --quant-bits 4"
  [opt13b-fp16-stream]="$thirteen --engine stream --gpu-memory 0 --trace RESULTS/opt13b-fp16-stream.trace.json"
  [opt13b-int8-stream]="$thirteen --engine stream --gpu-memory 0 --quant-bits 8"
  [opt13b-int4-stream]="$thirteen --engine stream --gpu-memory 0 --quant-bits 4 --trace RESULTS/opt13b-int4-stream.trace.json"
  [opt13b-int4-prefetch_2hh]="$thirteen --cpu-offload --quant-bits 4 --ds-config benchmarks/ds_configs/prefetch_2hh.json"
  [opt13b-int4-no_persistent]="$thirteen --cpu-offload --quant-bits 4 --ds-config benchmarks/ds_configs/no_persistent.json"
  [opt13b-pageable]="$thirteen --cpu-offload --pin-memory 0 --gen-len 9 --loops 1"
  [opt13b-accelerate]="$thirteen --engine accelerate --cpu-offload --gen-len 9 --loops 1 --warmup 0"
  [opt13b-disk]="$thirteen --disk-offload --gen-len 4 --loops 1"
  [opt13b-kv]="--model facebook/opt-13b --cpu-offload --kv-offload --pin-kv-cache --async-kv-offload --batch-size 64 --prompt-len 512"
  [opt13b-kv-stream]="--model facebook/opt-13b --engine stream --gpu-memory 0 --kv-offload --pin-kv-cache --async-kv-offload --batch-size 64 --prompt-len 512"
  [opt30b-fp16]="--model facebook/opt-30b --cpu-offload --batch-size 24 --prompt-len 512"
  [opt30b-int4]="--model facebook/opt-30b --cpu-offload --quant-bits 4 --batch-size 24 --prompt-len 512"
  [opt30b-half-stream]="--model facebook/opt-30b --engine stream --gpu-memory 28 --batch-size 24 --prompt-len 512"
  [llama70b-int4-stream]="--model meta-llama/Llama-3.1-70B --engine stream --gpu-memory 0 --quant-bits 4 --batch-size 32 --prompt-len 512"
  [llama405b-int4-stream]="--model meta-llama/Llama-3.1-405B --engine stream --quant-bits 4 --batch-size 32 --prompt-len 128 --gen-len 9 --loops 1"
  [llama8b-prefill-norms_off]="--model meta-llama/Llama-3.1-8B --engine resident --norm-kernels off --batch-size 8 --prompt-len 2048 --gen-len 2 --loops 5"
  [llama8b-prefill-norms_cuda]="--model meta-llama/Llama-3.1-8B --engine resident --norm-kernels cuda --batch-size 8 --prompt-len 2048 --gen-len 2 --loops 5"
)
compare_fp16_int4() {
  timeout "${CASE_S:-600}" python3 -m zero_inference compare --arm "fp16=$eight" --arm "int4=$eight --quant-bits 4" \
    --log-dir "$results/compare-fp16-int4" --format md
}
eight="--model meta-llama/Llama-3.1-8B --engine stream --gpu-memory 0 --dummy --batch-size 8 --prompt-len 128 --gen-len 9 --loops 1"
declare -A commands=(
  [link]="python3 -m zero_inference link --disk RESULTS"
  [micro-matmul]="python3 -m zero_inference micro matmul --format csv --plot RESULTS/micro-matmul.png"
  [micro-elementwise]="python3 -m zero_inference micro elementwise --format csv --plot RESULTS/micro-elementwise.png"
  [micro-layer]="python3 -m zero_inference micro layer --format csv --plot RESULTS/micro-layer.png"
  [compare-fp16-int4]=compare_fp16_int4
  [dequantize]="python3 benchmarks/dequantize_speed.py"
  [kv_cache_peer]="python3 benchmarks/kv_cache_peer.py --model facebook/opt-13b --dummy --cpu-offload --batch-size 64 --prompt-len 512 --gen-len 12 --loops 1 --warmup 1 --verbose 0"
)
order=(link micro-matmul micro-elementwise micro-layer dequantize llama8b-prefill-norms_off llama8b-prefill-norms_cuda
       opt13b-resident opt13b-fp16-stream opt13b-fp16 opt13b-int8-stream opt13b-int8 opt13b-int4-stream opt13b-int4 opt13b-kv-stream opt13b-kv
       kv_cache_peer opt30b-half-stream opt30b-fp16 opt30b-int4 llama70b-int4-stream llama405b-int4-stream compare-fp16-int4
       opt13b-pageable opt13b-accelerate opt13b-disk)
if [[ ${1:-} == --list ]]; then
  for name in "${order[@]}"; do echo "$name: ${runs[$name]:-${commands[$name]:-}}"; done
  declare -f compare_fp16_int4
  exit 0
fi
results=${1:?usage: measure_gpu.sh RESULT_DIR [CASE ...]}; shift
mkdir -p "$results" && results=$(cd "$results" && pwd)
cd "$(dirname "$0")/.."
[ $# -gt 0 ] && order=("$@")
failed=0 left=()
for name in "${order[@]}"; do
  if ((SECONDS > ${LIMIT_S:-1000000})); then left+=("$name"); continue; fi
  echo "== [$SECONDS s] $name" >&2
  if [[ -n ${runs[$name]:-} ]]; then
    # the options come last, so that a case may lower the loops
    read -ra words <<<"${LAUNCH:-python3} run_model.py --dummy --gen-len 17 --loops 3 --warmup 1 --log-file RESULTS/$name.log ${runs[$name]} ${EXTRA:-}"
    timeout "${CASE_S:-600}" "${words[@]//RESULTS/"$results"}" || { echo "$name failed ($?)" >&2; failed=1; }
  elif [[ -n ${commands[$name]:-} ]]; then
    extension=txt
    [[ ${commands[$name]} == *"--format csv"* ]] && extension=csv
    start="timeout ${CASE_S:-600}"
    declare -F "${commands[$name]}" >/dev/null && start=
    read -ra words <<<"$start ${commands[$name]}"
    # what an earlier start measured stays until there is something new
    if "${words[@]//RESULTS/"$results"}" >"$results/$name.part"; then
      mv "$results/$name.part" "$results/$name.$extension" && cat "$results/$name.$extension"
    else
      echo "$name failed ($?); what it printed is in $results/$name.part" >&2
      failed=1
    fi
  else
    echo "error: $name: no such case; scripts/measure_gpu.sh --list shows them" >&2
    failed=1
  fi
done
[ ${#left[@]} -gt 0 ] && echo "not started within ${LIMIT_S} s: ${left[*]}" >&2
if compgen -G "$results/*.jsonl" >/dev/null; then
  python3 -m zero_inference report "$results" --format md >"$results/table.md" && cat "$results/table.md"
fi
echo "== [$SECONDS s] done" >&2
exit $failed
