#!/bin/sh
# Which load mode is soonest ready on this disk, and whether the tool then uses it. Later checks start with that mode.
set -eu
state=$(mktemp -d /tmp/e-XXXXXX)
trap 'rm -rf "$state"' EXIT
set -- -p "${GPU_PROFILE:-cuda}" -m "$MODEL_ID=$MODEL" --engine "$ENGINE" --state-dir "$state"
"$PYTHON" -m edge plan "$@" >"$RESULTS/plan-before.txt"
"$PYTHON" -m edge bench load --apply --repeat "${GPU_LOADS:-2}" "$@" >"$RESULTS/bench-load.txt"
cat "$RESULTS/bench-load.txt"
"$PYTHON" -m edge plan "$@" >"$RESULTS/plan-after.txt"
grep -h load_mode "$RESULTS/plan-before.txt" "$RESULTS/plan-after.txt"
cp "$state/data/load_modes.json" "$RESULTS/load_modes.json"
mode=$(sed -n 's/^  load_mode *\([a-z]*\) .*/\1/p' "$RESULTS/plan-after.txt")
grep -q "^$mode.* soonest ready" "$RESULTS/bench-load.txt"
