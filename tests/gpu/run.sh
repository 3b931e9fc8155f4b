#!/bin/sh
# On a machine with an NVIDIA GPU: builds the recipe `cuda`, proves it, and serves a model with every layer offloaded.
#   tests/gpu/run.sh [FOLDER of pack.sh] [RESULTS]         default: .gpu, ./gpu-results
# Nothing is fetched. Needs: python3 >= 3.10 with numpy, nvcc, cmake, ninja, gcc. Other checks: tests/gpu/checks/*.sh, in
# the order of their names, each with PYTHON, STATE, ENGINE (llama-server), BENCH (llama-bench), MODEL, MODEL_ID, URL,
# RESULTS and a server that is READY at URL. A check that fails fails the run; the others still run. To rehearse without
# a GPU: GPU_RECIPE=cpu GPU_PROFILE=cpu GPU_MODEL_GB=0.2. GPU_CHECKS="35-load 50-limit" runs only these; GPU_WORK=FOLDER
# keeps build and models between runs.
set -eu
cd "$(dirname "$0")/../.."
packed=${1:-.gpu}
RESULTS=${2:-gpu-results}
mkdir -p "$RESULTS"
RESULTS=$(cd "$RESULTS" && pwd)
packed=$(cd "$packed" && pwd)
work=${GPU_WORK:-$(mktemp -d /tmp/edgellm-gpu.XXXXXX)}
mkdir -p "$work"
PYTHON=${PYTHON:-python3}
STATE=$work/state
export PYTHON STATE RESULTS PYTHONUNBUFFERED=1

say() { printf '== %s\n' "$*"; }

say "machine"
recipe=${GPU_RECIPE:-cuda}
profile=${GPU_PROFILE:-cuda}
if [ "$recipe" = cuda ]; then
    nvidia-smi --query-gpu=name,compute_cap,driver_version,memory.total --format=csv | tee "$RESULTS/gpu.txt"
    { nvcc --version || /usr/local/cuda/bin/nvcc --version; } 2>/dev/null | tail -2
fi
"$PYTHON" --version; nproc; uname -r

if [ -d "$packed/wheels" ]; then
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$work/site" "$packed"/wheels/*.whl
fi
PYTHONPATH=$PWD:$work/site
export PYTHONPATH
edgellm() { "$PYTHON" -m edge "$@"; }

commit=$(cat "$packed/commit")
mkdir -p "$STATE/cache/src"
if [ ! -d "$STATE/cache/src/$commit" ]; then
    tar -xf "$packed/llama.cpp.tar.xz" -C "$STATE/cache/src"
    # A build compares the tree with what was unpacked, and would fetch it anew.
    "$PYTHON" -c 'import sys, pathlib, edge.builder.source as s; s.remember(pathlib.Path(sys.argv[1]))' \
        "$STATE/cache/src/$commit"
fi

say "build"
edgellm build --recipe "$recipe" --state-dir "$STATE" --dry-run --json >"$RESULTS/plan.json"
begin=$(date +%s)
edgellm build --recipe "$recipe" --state-dir "$STATE" --json >"$RESULTS/build.json" || {
    tail -40 "$STATE"/cache/build/*/edgellm-build.log
    exit 1
}
echo "built in $(($(date +%s) - begin)) s"
edgellm engine show --json --state-dir "$STATE" >"$RESULTS/engine.json"
ENGINE=$("$PYTHON" -c 'import json,sys; print(json.load(open(sys.argv[1]))["path"])' "$RESULTS/engine.json")
BENCH=${ENGINE%llama-server}llama-bench
edgellm engine list --state-dir "$STATE"

say "model"
gb=${GPU_MODEL_GB:-2}
MODEL=$work/models-$gb/gpu.gguf  # alone in its folder: a remembered launch holds while nothing is added to that
MODEL_ID=gpu
mkdir -p "${MODEL%/*}"
[ -f "$MODEL" ] || "$PYTHON" tests/bench/random_model.py "$MODEL" --type Q5_K_M --gb "$gb"
export ENGINE BENCH MODEL MODEL_ID

say "serve"
port=${GPU_PORT:-18099}
URL=http://127.0.0.1:$port
export URL
# Not through the function: $! would be the shell's own copy, and its end would leave the server behind.
"$PYTHON" -m edge up -p "$profile" -m "$MODEL_ID=$MODEL" --listen "127.0.0.1:$port" --state-dir "$STATE" >"$RESULTS/up.log" 2>&1 &
up=$!
stop() {
    kill -TERM "$up" 2>/dev/null || true
    wait "$up" 2>/dev/null || true
}
trap stop EXIT
status=0
if "$PYTHON" tests/gpu/judge.py "$URL" "$MODEL_ID" "$RESULTS"; then
    for check in tests/gpu/checks/*.sh; do
        name=$(basename "$check" .sh)
        case " ${GPU_CHECKS:-$name} " in *" $name "*) ;; *) continue ;; esac
        say "check $name"
        sh "$check" || { echo "FAILED: $check"; status=1; }
    done
else
    status=1
    tail -60 "$RESULTS/up.log"
fi
stop
trap - EXIT

say "bench"
"$BENCH" -m "$MODEL" -ngl 99 -p 512 -n 128 -r 3 -o json >"$RESULTS/bench.json" 2>"$RESULTS/bench.err" || status=1
"$PYTHON" -c '
import json, sys
for row in json.load(open(sys.argv[1])):
    print("{:6} {:10.1f} tok/s".format("pp%d" % row["n_prompt"] if row["n_prompt"] else "tg%d" % row["n_gen"], row["avg_ts"]))
' "$RESULTS/bench.json" || status=1
if [ $status -eq 0 ]; then say "all good"; else say "FAILED"; fi
exit $status
