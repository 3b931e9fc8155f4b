#!/usr/bin/env bash
# README's two commands as a stranger has them: a fresh clone, an empty environment and an empty home.
#
#   tests/stranger.sh            as root: `make up` as root, then as `nobody` also its tests and `make up` again
#   tests/stranger.sh --quick    without `make test`
#
# An ordinary user can only try `make up`: the tests ran before, for the user of `make test-full`.
set -euo pipefail
set -m # jobs get a process group of their own, and do not ignore SIGINT
checkout=$(cd "$(dirname "$0")/.." && pwd)
TEST_S=${TEST_S:-1800} # for `make test` on two slow cores
works=()
cleanup() {
    local job
    for job in $(jobs -p); do kill -KILL -- "-$job" 2>/dev/null || true; done
    [ ${#works[@]} = 0 ] || rm -rf "${works[@]}"
}
trap cleanup EXIT

# Clones and processes of a run that was killed go; ours name this one. See tests/leftovers.py.
mark=$$:$(cut -d' ' -f22 /proc/$$/stat)
python3 -I "$checkout/tests/leftovers.py" '/tmp/edgellm-stranger.*/run'

# A clone and a home for user $1, in $work; `as COMMAND…` runs there as that user.
arrive() {
    user=$1
    work=$(mktemp -d /tmp/edgellm-stranger.XXXXXX)
    works+=("$work")
    echo "$mark" >"$work/run"
    mkdir "$work/home"
    git clone -q "$checkout" "$work/edgellm"
    [ "$(id -un)" = "$user" ] || chown -R "$user:" "$work"
    address=127.0.0.1:$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
}
as() {
    local enter=()
    if [ "$(id -un)" != "$user" ]; then
        enter=(setpriv "--reuid=$user" "--regid=$(id -g "$user")" --clear-groups)
    elif [ "$user" = root ]; then
        # root keeps its models in /var/lib/edgellm: here they are in memory, and gone afterwards. An edgellm of this
        # machine has the lock in /run/edgellm.
        mkdir -p /var/lib/edgellm /var/cache/edgellm-root && mkdir -p -m 700 /run/edgellm
        enter=(unshare --mount --propagation private sh -c 'mount -t tmpfs none /var/lib/edgellm &&
            mount -t tmpfs none /var/cache/edgellm-root && mount -t tmpfs -o mode=700 none /run/edgellm && exec "$@"' sh)
    fi
    (cd "$work/edgellm" && exec "${enter[@]}" env -i "HOME=$work/home" PATH=/usr/bin:/bin \
        "EDGELLM_LISTEN=$address" "EDGE_TEST_RUN=$mark" "PYTEST_ADDOPTS=${PYTEST_ADDOPTS:-}" "$@")
}

# `make up`, one chat, Ctrl-C.
serves() {
    local job answer code=0
    as make up >"$work/up.log" 2>&1 &
    job=$!
    answer=$(curl -s --retry 900 --retry-delay 1 --retry-connrefused --max-time 900 "http://$address/v1/chat/completions" \
        -H 'Content-Type: application/json' -d '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}') || code=$?
    if [ "$code" != 0 ] || [[ $answer != *'"choices"'* ]]; then
        tail -n 30 "$work/up.log" >&2
        echo "stranger: make up as $user: $answer" >&2
        return 1
    fi
    kill -INT -- "-$job"
    timeout 60 tail --pid="$job" -f /dev/null || { echo "stranger: Ctrl-C did not end it for $user" >&2; return 1; }
    wait "$job" || true
    if grep -n Traceback "$work/up.log" >&2; then return 1; fi
    echo "stranger: make up serves for $user, and Ctrl-C ends it"
}

# `make install` below the home: the system's folders stay as they are.
installs() {
    as make install "PREFIX=$work/opt" "COMMAND=$work/home/bin/edgellm" SUDO= >"$work/install.log" 2>&1 ||
        { cat "$work/install.log" >&2; return 1; }
    rm -rf "$work/edgellm/.venv" # the installation needs neither the checkout nor its environment
    (cd / && env -i "PATH=$work/home/bin:/usr/bin:/bin" edgellm --version)
    echo "stranger: make install works for $user"
}

tests() {
    if ! as timeout "$TEST_S" make test >"$work/test.log" 2>&1; then
        grep -E '^(FAILED|ERROR)' "$work/test.log" >&2 || true
        tail -n 40 "$work/test.log" >&2
        echo "stranger: make test as $user failed" >&2
        return 1
    fi
    echo "stranger: make test passes for $user: $(grep -E '[0-9] passed' "$work/test.log" | paste -sd ';')"
    grep '^RERUN ' "$work/test.log" | sort -u || true # with --reruns and -r R, as .ci/run has them
}

arrive "$(id -un)"
serves
if [ "$(id -u)" = 0 ]; then
    arrive nobody
    serves
    if [ "${1:-}" != --quick ]; then
        tests
        serves
    fi
    installs
fi
