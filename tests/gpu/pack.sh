#!/bin/sh
# Makes what tests/gpu/run.sh needs on a machine without a network: the pinned llama.cpp, slimmed to what a CUDA or CPU
# build reads, and Python wheels. Run it where PyPI can be reached:
#   tests/gpu/pack.sh [FOLDER] [PYTHON]        default: .gpu, .venv/bin/python
# Then carry FOLDER beside the checkout to the machine with the GPU. About 4 MB and 8 MB.
set -eu
cd "$(dirname "$0")/../.."
into=${1:-.gpu}
python=${2:-.venv/bin/python}
rm -rf "$into"
mkdir -p "$into/wheels"

"$python" - "$into" <<'END'
import sys
from pathlib import Path

from edge.builder.source import parse_source, pins
from edge.builder.plan import build_table
from edge.builder.source import fetch

into = Path(sys.argv[1])
table = build_table()
source = fetch(parse_source("pypi"), pins(table)[0], into / "src", tuple(table["tree"]["drop"]), print)
(into / "commit").write_text(source.commit[:9])
END

# Back ends of other makers and the web page's rest: never read with GGML_CUDA alone.
commit=$(cat "$into/commit")
others=""
for name in vulkan sycl metal opencl cann hexagon webgpu musa hip rpc zdnn zendnn virtgpu openvino et amx-none; do
    others="$others --exclude=$commit/ggml/src/ggml-$name"
done
# shellcheck disable=SC2086 # a list of options
tar -C "$into/src" $others --exclude="$commit/models" --exclude="$commit/pocs" \
    --exclude="*.md" -cf - "$commit" | xz -T2 -6 >"$into/llama.cpp.tar.xz"
rm -rf "$into/src"

# What edgellm needs (pyproject.toml), for the Python of the GPU machine.
"$python" - >"$into/requirements.txt" <<'END'
try:
    import tomllib
except ImportError:
    import tomli as tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
print(*project["dependencies"], *project["optional-dependencies"]["nvml"], sep="\n")
END
"$python" -m pip download --quiet --only-binary=:all: --python-version "${GPU_PYTHON:-3.12}" --implementation cp \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
    --platform manylinux_2_12_x86_64 --platform manylinux2010_x86_64 --platform manylinux1_x86_64 \
    -d "$into/wheels" -r "$into/requirements.txt"
du -sh "$into/llama.cpp.tar.xz" "$into/wheels"
