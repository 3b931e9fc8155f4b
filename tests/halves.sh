#!/usr/bin/env bash
# The tests of `make test` in two processes at once: for more than half of their time they wait for other processes.
set -euo pipefail
cd "$(dirname "$0")/.."
first=(tests/daemon tests/supervisor) # about as long as all others together

log=$(mktemp)
finish() {
    local job
    for job in $(jobs -p); do kill -INT "$job" 2>/dev/null || true; done
    wait || true
    rm -f "$log"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
failed=0
"$1" -m pytest -m "not full" "${first[@]}" >"$log" 2>&1 &
one=$!
"$1" -m pytest -m "not full" "${first[@]/#/--ignore=}" &
wait $! || failed=1
wait "$one" || failed=1
echo "== ${first[*]}"
cat "$log"
exit "$failed"
