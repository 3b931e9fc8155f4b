#!/bin/sh
# How far a cold start is from the limit that edgellm states for it.
set -eu
set --
[ ! -e "$RESULTS/load_modes.json" ] || set -- --measured "$RESULTS/load_modes.json"
"$PYTHON" tests/bench/engine_ready.py "$MODEL" --cold --pairs "${GPU_LIMITS:-3}" --profile "${GPU_PROFILE:-cuda}" \
    --engine "$ENGINE" "$@" >"$RESULTS/limit.txt"
cat "$RESULTS/limit.txt"
