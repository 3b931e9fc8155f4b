#!/bin/sh
# The first answer after process start: the bare engine with the plan's own flags, `up` that plans, `up` that remembers.
# Interleaved turns, with a warm page cache and with the model's pages dropped. GPU_PAIRS=0 skips it.
set -eu
pairs=${GPU_PAIRS:-5}
[ "$pairs" -gt 0 ] || exit 0
profile=${GPU_PROFILE:-cuda}
measure() {
    "$PYTHON" tests/bench/first_answer.py "$MODEL" --profile "$profile" --engine "$ENGINE" --pairs "$pairs" "$@"
}
measure | tee "$RESULTS/first-answer-warm.txt" | tail -8
measure --cold | tee "$RESULTS/first-answer-cold.txt" | tail -8
