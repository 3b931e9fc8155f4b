#!/bin/sh
# How far a cold start is from the limit that edgellm states for it.
set -eu
mode=$(cat "$RESULTS/load-mode" 2>/dev/null || echo auto)
"$PYTHON" tests/bench/engine_ready.py "$MODEL" --cold --pairs "${GPU_LIMITS:-3}" --profile "${GPU_PROFILE:-cuda}" \
    --engine "$ENGINE" --load-mode "$mode" >"$RESULTS/limit.txt"
cat "$RESULTS/limit.txt"
