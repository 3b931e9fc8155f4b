#!/usr/bin/env bash
# The tests of `make test` in two processes at once: for more than half of their time they wait for other processes.
set -euo pipefail
cd "$(dirname "$0")/.."
first=(tests/daemon tests/pool tests/supervisor) # about as long as all others together

log=$(mktemp)
trap 'rm -f "$log"' EXIT
failed=0
"$1" -m pytest -m "not full" "${first[@]}" >"$log" 2>&1 &
half=$!
"$1" -m pytest -m "not full" "${first[@]/#/--ignore=}" || failed=1
wait "$half" || failed=1
echo "== ${first[*]}"
cat "$log"
exit "$failed"
