#!/bin/sh
# The first answer after process start: the bare engine with the plan's own flags and with its defaults, `up` that
# plans, `up` that remembers. Interleaved turns: GPU_PAIRS with a warm page cache, GPU_COLD_PAIRS with the model's pages
# dropped.
set -eu
known=""
[ ! -e "$RESULTS/load_modes.json" ] || known="--measured $RESULTS/load_modes.json"
# shellcheck disable=SC2086 # options
measure() {
    [ "$2" -gt 0 ] || return 0
    "$PYTHON" tests/bench/first_answer.py "$MODEL" --profile "${GPU_PROFILE:-cuda}" --engine "$ENGINE" \
        $known --records "$RESULTS/$1.jsonl" --pairs "$2" --seconds "$3" $4 >"$RESULTS/$1.txt"
    cat "$RESULTS/$1.txt"
}
measure first-answer-warm "${GPU_PAIRS:-5}" "${GPU_WARM_S:-600}" ""
measure first-answer-cold "${GPU_COLD_PAIRS:-5}" "${GPU_COLD_S:-600}" --cold
