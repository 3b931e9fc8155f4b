#!/bin/sh
# An idle model's first token: its engine ended and started again, or asleep by itself.
set -eu
state=$(mktemp -d /tmp/e-XXXXXX)
trap 'rm -rf "$state"' EXIT
"$PYTHON" -m edge bench sleep --repeat "${GPU_SLEEPS:-3}" -p "${GPU_PROFILE:-cuda}" -m "$MODEL_ID=$MODEL" \
    --engine "$ENGINE" --state-dir "$state" >"$RESULTS/bench-sleep.txt"
cat "$RESULTS/bench-sleep.txt"
