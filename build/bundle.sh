#!/usr/bin/env bash
# Everything for boards without a network, in the layout that `edgellm service install --offline DIR` reads:
#
#   build/bundle.sh PYTHON OUT MACHINE VERSION...     build/bundle.sh .venv/bin/python dist/bundle aarch64 3.10 3.12
#
# Wheels come from the package index for MACHINE and each Python VERSION; the engine and the models are those that this
# machine has selected and stored. EDGELLM_STATE_DIR names another store; WHEELS_ONLY=1 leaves engine and models out.
set -euo pipefail
[ $# -ge 4 ] || { sed -n '2,7s/^# \{0,1\}//p' "$0" >&2; exit 64; }
python=$(realpath -s "$1") out=$2 machine=$3
shift 3
checkout=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$out/wheels" "$out/models"
out=$(realpath "$out")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$python" -m build --wheel --outdir "$work" "$checkout" >"$work/log" 2>&1 || { tail -n 30 "$work/log" >&2; exit 1; }
wheel=$(ls "$work"/edgellm-*.whl)
rm -f "$out"/wheels/edgellm-*.whl
cp "$wheel" "$out/wheels"

# JetPack 6 has glibc 2.35, JetPack 7 2.39: a wheel for manylinux_2_34 or older fits both.
platforms=(--platform "linux_$machine")
for tag in manylinux2014 manylinux_2_17 manylinux_2_28 manylinux_2_34; do platforms+=(--platform "${tag}_$machine"); done
for version in "$@"; do
    "$python" -m pip download -q --disable-pip-version-check --only-binary=:all: --implementation cp \
        --python-version "$version" "${platforms[@]}" --platform any --dest "$out/wheels" "$wheel[embedded,hub]"
done

cp "$checkout/build/offline-install.sh" "$out/install.sh"

[ -z "${WHEELS_ONLY:-}" ] || exit 0
edgellm=$(dirname "$python")/edgellm
# Engines fit only their own machine; the embedded one comes with its wheel.
if [ "$machine" != "$(uname -m)" ]; then
    echo "bundle: no engine is in it, because this machine is $(uname -m) and the boards are $machine: they serve from the" \
        "CPU, or run \`edgellm engine export engine.tar.gz\` on a board that has built one and put the file into $out" >&2
elif "$edgellm" engine list --json | "$python" -c '
import json, sys
listed = json.load(sys.stdin)
sys.exit(listed["current"] not in [engine["id"] for engine in listed["engines"]])'; then
    "$edgellm" engine export "$out/engine.tar.gz"
fi
"$edgellm" model list --json | "$python" -c '
import json, sys
for model in json.load(sys.stdin)["models"]:
    files = model["shards"] or [model["path"]]
    print(*files, *filter(None, [model["mmproj"]]), sep="\n")' | while read -r path; do
    cp --reflink=auto "$path" "$out/models/"
done
du -sh "$out" | sed 's/\t/ in /'
