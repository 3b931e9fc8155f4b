#!/usr/bin/env bash
# The tests of `make test` in two processes at once: for more than half of their time they wait for other processes.
set -euo pipefail
cd "$(dirname "$0")/.."
first=(tests/daemon tests/supervisor) # about as long as all others together

logs=$(mktemp -d)
finish() {
    local job
    for job in $(jobs -p); do kill -INT "$job" 2>/dev/null || true; done
    wait || true
    rm -rf "$logs"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
failed=0
: >"$logs/others" # made here: tail may look before the other process has opened it
"$1" -m pytest -m "not full" "${first[@]}" >"$logs/first" 2>&1 &
one=$!
"$1" -m pytest -m "not full" "${first[@]/#/--ignore=}" >"$logs/others" 2>&1 &
two=$!
tail -n +1 -s 0.2 --pid="$two" -f "$logs/others" &
shown=$!
wait "$two" || failed=1
wait "$shown" || true
wait "$one" || failed=1
echo "== ${first[*]}"
cat "$logs/first"
# With --reruns and -r R, as .ci/run has them: what passed at last only.
echo "tests that needed a second try: $(cat "$logs"/* | grep -c '^RERUN ')"
cat "$logs"/* | grep '^RERUN ' || true
exit "$failed"
