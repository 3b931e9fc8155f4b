#!/usr/bin/env bash
# sdist → wheel → clean venv → `edgellm plan` and a real start from another folder: nothing depends on the checkout.
set -euo pipefail
python=$(realpath -s "$1")
checkout=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$checkout"
"$python" -m build --outdir "$work/dist" . >"$work/build.log" 2>&1 || { tail -n 30 "$work/build.log"; exit 1; }
"$python" -m venv "$work/venv"
wheel=$(ls "$work"/dist/*.whl)
"$work/venv/bin/pip" install -q --disable-pip-version-check "$wheel[embedded]"
cd "$work"
model=$(cd "$checkout" && "$python" -c '
from tests.conftest import CACHE
from edge.models.pull import pull
from tests.serving import DEMO
print(pull(DEMO, CACHE / "models").path)')
"$work/venv/bin/edgellm" plan -p cpu -m "$model" --state-dir "$work/state" --json >plan.json
"$work/venv/bin/python" - <<'PY'
import json, pathlib, edge
plan = json.load(open("plan.json"))
assert plan["schema"] == 1 and plan["models"], plan
assert "site-packages" in edge.__file__, edge.__file__
print("the wheel plans", ", ".join(plan["models"]), "from", pathlib.Path.cwd())
PY
