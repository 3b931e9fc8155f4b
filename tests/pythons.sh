#!/usr/bin/env bash
# Unit tests on the oldest and the newest Python at hand beside the one given (3.10 is JetPack 6's).
set -euo pipefail
cd "$(dirname "$0")/.."
main=$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])')

candidates() {
    local version python
    for version in 3.10 3.11 3.12 3.13 3.14; do
        for python in "python$version" "$HOME"/.pyenv/versions/"$version"*/bin/python; do
            if "$python" -c "import sys, venv, ensurepip; sys.exit('%d.%d' % sys.version_info[:2] != '$version')" 2>/dev/null; then
                echo "$version $python"
                break
            fi
        done
    done
}

unit_tests() { # VERSION PYTHON
    local venv=.venv-$1
    # One that was cut off, or whose Python is gone, is made anew: venv gives no pip to a folder that has half of it.
    "$venv/bin/python" -m pip --version >/dev/null 2>&1 && [ -x "$venv/bin/pip" ] || "$2" -m venv --clear "$venv"
    if [ ! -e "$venv/.dev" ] || [ pyproject.toml -nt "$venv/.dev" ]; then
        "$venv/bin/pip" install -q --disable-pip-version-check -e '.[embedded,hub,tools,nvml,dev]'
        touch "$venv/.dev"
    fi
    # Whole processes are run by the main Python only: here it is the language and the library that differ.
    "$venv/bin/python" -m pytest -m "not full and not e2e and not slow" --ignore=tests/daemon --ignore=tests/telemetry \
        --ignore=tests/plan/test_plan_real_engine.py --ignore=tests/pool/test_pool_up.py
}

found=$(candidates)
oldest=$(head -n 1 <<<"$found")
newest=$(tail -n 1 <<<"$found")
failed=0
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
declare -A jobs=()
for row in "$oldest" "$newest"; do
    read -r version python <<<"$row"
    if [ -z "${version:-}" ] || [ "$version" = "$main" ] || [ -n "${jobs[$version]:-}" ]; then continue; fi
    echo "== unit tests on Python $version"
    (set -e; unit_tests "$version" "$python") >"$logs/$version" 2>&1 & # both at once: each takes one core
    jobs[$version]=$!
done
for version in "${!jobs[@]}"; do
    if wait "${jobs[$version]}"; then
        echo "Python $version: $(tail -n 1 "$logs/$version")"
        grep '^RERUN ' "$logs/$version" || true # with --reruns and -r R, as .ci/run has them
    else
        failed=1
        cat "$logs/$version"
        echo "Python $version: unit tests failed" >&2
    fi
done
exit "$failed"
