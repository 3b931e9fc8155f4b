#!/usr/bin/env bash
# Builds build/Containerfile whole, on a plain Debian that mmdebstrap makes here, and has the image serve the demo model:
#   tests/container.sh [PYTHON]        default: .venv/bin/python
# As root; needs: apt-get install buildah mmdebstrap. 15 to 25 minutes on two cores. BUILDAH_OPTIONS: more options of
# `buildah build`, such as -v FILE:FILE:ro for the configuration that pip needs here. Not part of `make test-full`.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-.venv/bin/python}
suite=${SUITE:-bookworm}
port=${PORT:-18765}
work=$(mktemp -d /tmp/edgellm-container.XXXXXX)
container='' server=''
finish() {
    # Asked by its own command: a signal would end the shell that waits for it, and leave the server behind.
    [ -z "$server" ] || { run "$container" -- edgellm stop && wait "$server"; } || true
    [ -z "$container" ] || buildah rm "$container" >/dev/null
    rm -rf "$work"
}
trap finish EXIT

say() { printf '== %s\n' "$*"; }

say "a plain Debian $suite"
mirror=$("$python" -c 'from tests.boot.image import mirror; print(mirror())')
mmdebstrap --quiet --variant=minbase "$suite" "$work/base.tar" "deb $mirror $suite main"
base=$(buildah from scratch)
buildah add -q "$base" "$work/base.tar" / >/dev/null
buildah commit -q --rm "$base" edgellm-test-base >/dev/null

say "build"
begin=$(date +%s)
# shellcheck disable=SC2086 # a list of options
buildah build --isolation chroot --network host ${BUILDAH_OPTIONS:-} -f build/Containerfile -t edgellm-test \
    --build-arg BUILD_BASE=localhost/edgellm-test-base --build-arg RUN_BASE=localhost/edgellm-test-base . >"$work/log" 2>&1 ||
    { tail -40 "$work/log"; exit 1; }
echo "built in $(($(date +%s) - begin)) s"
buildah images --format '{{.Name}} {{.Size}}' | grep edgellm-test

container=$(buildah from localhost/edgellm-test)
run() { buildah run --isolation chroot --network host "$@"; }

say "no compiler, no root"
run "$container" -- sh -c '! command -v g++ cmake ninja && test "$(id -u)" = 10001 && edgellm engine list'

say "serve"
models=$("$python" -c 'from edge.models.pull import pull; from tests.conftest import CACHE; from tests.serving import DEMO; from pathlib import Path; print(Path(pull(DEMO, CACHE / "models").path).parent)')
run -v "$models:/edgellm/data/models:ro" "$container" -- \
    edgellm up -p cpu --set n_threads=1 --listen "127.0.0.1:$port" >"$work/up.log" 2>&1 &
server=$!
for _ in $(seq 600); do
    curl -sf "http://127.0.0.1:$port/readyz" >/dev/null && break
    kill -0 "$server" 2>/dev/null || break
    sleep 0.2
done
curl -sf "http://127.0.0.1:$port/v1/chat/completions" -H 'Content-Type: application/json' \
    -d '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}' || { cat "$work/up.log"; exit 1; }
echo
curl -sf "http://127.0.0.1:$port/healthz" | "$python" -c 'import json, sys; print(json.load(sys.stdin)["status"])'
say "all good"
