#!/usr/bin/env bash
# Measures the norm kernels and their peers: benchmarks/run_cases.py of every case and dtype, one process a GPU at a time.
# Tables go to RESULT_DIR/{case}/{dtype}/, what each process printed to RESULT_DIR/logs/; benchmarks/draw_plots.py draws them.
# usage: scripts/measure_norms.sh RESULT_DIR [GPUS]      GPUS: such as 0,1 (default: all that are visible)
#   LIMIT_S=...         starts nothing after so many seconds, and says what is left (default: no limit)
#   CASES=... DTYPES=...  less than all, such as CASES="rms poly" DTYPES=bf16
#   EXTRA=...           more options for run_cases.py;  PYTHON=... (default: python3)
# Exit codes: 1 if a process failed, 2 without a GPU.
set -uo pipefail
results=${1:?usage: measure_norms.sh RESULT_DIR [GPUS]}
mkdir -p "$results/logs"
results=$(cd "$results" && pwd)
cd "$(dirname "$0")/.."
gpus=${2:-${CUDA_VISIBLE_DEVICES:-$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | paste -sd,)}}
[[ -n $gpus ]] || { echo "error: no GPU is visible; name them: measure_norms.sh RESULT_DIR 0,1" >&2; exit 2; }
limit_s=${LIMIT_S:-1000000}
read -ra cases <<<"${CASES:-$(basename -s .py benchmarks/cases/[!_]*.py | paste -sd' ')}"
read -ra dtypes <<<"${DTYPES:-bf16 fp16 fp32}"

jobs=()
for dtype in "${dtypes[@]}"; do
  for case in "${cases[@]}"; do jobs+=("--case $case --dtype $dtype"); done
done

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
echo 0 >"$work/next"

take() {  # the number of the next job, each once
  (
    flock 9
    number=$(<"$work/next")
    echo $((number + 1)) >"$work/next"
    echo "$number"
  ) 9>"$work/lock"
}

serve() {  # one GPU, until there are no more jobs
  local gpu=$1 number job name began
  while ((SECONDS < limit_s)) && number=$(take) && ((number < ${#jobs[@]})); do
    job=${jobs[number]}
    name=${job//--case /} name=${name//--dtype /} name=${name//--/} name=${name// /-}
    began=$SECONDS
    echo "[$SECONDS s] GPU $gpu: $name"
    # shellcheck disable=SC2086
    if CUDA_VISIBLE_DEVICES=$gpu "${PYTHON:-python3}" benchmarks/run_cases.py $job --peers --save-path "$results" ${EXTRA:-} \
        >"$results/logs/$name.log" 2>&1; then
      echo "[$SECONDS s] GPU $gpu: $name took $((SECONDS - began)) s"
    else
      echo "[$SECONDS s] GPU $gpu: $name failed with exit code $?; the end of $results/logs/$name.log:"
      tail -n 3 "$results/logs/$name.log"
      echo "$name" >>"$work/failed"
    fi
  done
}

IFS=, read -ra each <<<"$gpus"
for gpu in "${each[@]}"; do serve "$gpu" & done
wait
started=$(<"$work/next")
outcome="all results are"
if ((started < ${#jobs[@]})); then
  echo "not started within $limit_s s:" >&2
  printf '  %s\n' "${jobs[@]:started}" >&2
  outcome="what was measured is"
fi
if [[ -s $work/failed ]]; then
  echo "error: failed: $(paste -sd' ' "$work/failed")" >&2
  exit 1
fi
echo "[$SECONDS s] $outcome in $results"
