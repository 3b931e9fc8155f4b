#!/bin/sh
# Cross-builds llama-server for the aarch64 of a Jetson on an x86-64 Debian, and starts it under qemu-user:
#   tests/cross/aarch64.sh cpu|cuda [FOLDER] [PYTHON]      default: ~/.cache/edgellm-cross, .venv/bin/python
# Needs: apt-get install crossbuild-essential-arm64 qemu-user-static cmake ninja-build ccache; cuda also nvcc 13.0 and
# 1 GB from PyPI. About 12 CPU-minutes for cpu, 40 more for cuda; a second run goes on. Leaves FOLDER/<kind>/llama-server.sh,
# which starts the server under qemu: a file for `edgellm up --engine`. The cuda one has CUDA compiled in and no driver:
# it answers /health with 200 and works on the CPU, which edgellm must notice.
set -eu
cd "$(dirname "$0")/../.."
kind=${1:?cpu or cuda}
folder=${2:-$HOME/.cache/edgellm-cross}
python=${3:-.venv/bin/python}
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
repository=$PWD
cublas=13.0.2.14
runtime=13.0.96

for tool in aarch64-linux-gnu-g++ qemu-aarch64-static cmake ninja; do
    command -v "$tool" >/dev/null || { echo "$tool is missing; see the head of $0"; exit 69; }
done

"$python" - "$folder" <<'END'
import sys
from pathlib import Path

from edge.builder.source import parse_source, pins
from edge.builder.plan import build_table
from edge.builder.source import fetch

table = build_table()
source = fetch(parse_source("pypi"), pins(table)[0], Path(sys.argv[1]) / "src", tuple(table["tree"]["drop"]), print)
(Path(sys.argv[1]) / "commit").write_text(source.commit[:9])
END
commit=$(cat "$folder/commit")
build=$folder/$kind/build
libraries=/usr/aarch64-linux-gnu
mkdir -p "$folder/$kind"

wheel() { # NAME VERSION PLATFORM: unpacks the aarch64 wheel's nvidia folder
    [ -d "$folder/nv/$1" ] && return
    "$python" -m pip download -q --no-deps --only-binary=:all: --platform "$3" -d "$folder/wheels" "$1==$2"
    mkdir -p "$folder/nv/$1.part"
    "$python" -m zipfile -e "$folder"/wheels/"$(echo "$1" | tr - _)"-"$2"-*aarch64.whl "$folder/nv/$1.part"
    mv "$folder/nv/$1.part" "$folder/nv/$1"
}

if [ "$kind" = cuda ]; then
    nvcc=$(readlink -f "$(command -v /usr/local/cuda-13.0/bin/nvcc || command -v /usr/local/cuda/bin/nvcc || command -v nvcc)")
    root=$folder/cuda
    wheel nvidia-cublas "$cublas" manylinux_2_27_aarch64
    wheel nvidia-cuda-runtime "$runtime" manylinux2014_aarch64
    if [ ! -e "$root/ready" ]; then
        rm -rf "$root"
        cp -a "$(dirname "$(dirname "$nvcc")")" "$root"
        rm -rf "$root/targets"
        sbsa=$root/targets/sbsa-linux
        mkdir -p "$sbsa/lib"
        ln -s ../../include "$sbsa/include"
        ln -s sbsa-linux "$root/targets/aarch64-linux"
        for package in nvidia-cublas nvidia-cuda-runtime; do
            cp -rn "$folder/nv/$package"/nvidia/cu13/include/. "$root/include/"
            cp -a "$folder/nv/$package"/nvidia/cu13/lib/. "$sbsa/lib/"
        done
        for name in cublas cublasLt cudart; do ln -sf "lib$name.so.13" "$sbsa/lib/lib$name.so"; done
        touch "$root/ready"
    fi
    export CUDA_CROSS_ROOT="$root"
    recipe=$repository/build/orin.cmake
    set -- "-DCUDAToolkit_ROOT=$root"
    libraries=$libraries:$root/targets/sbsa-linux/lib
else
    recipe=$repository/build/cpu.cmake
    gomp=$(aarch64-linux-gnu-gcc -print-file-name=libgomp.a)
    # -static alone would meet libgomp.so at the last step.
    set -- -DGGML_NATIVE=OFF -DGGML_CPU_ARM_ARCH=armv8.2-a+dotprod+fp16 \
        -DCMAKE_EXE_LINKER_FLAGS=-static "-DOpenMP_gomp_LIBRARY=$gomp"
fi

LC_ALL=C cmake -C "$recipe" -S "$folder/src/$commit" -B "$build" -G Ninja \
    "-DCMAKE_TOOLCHAIN_FILE=$repository/tests/cross/aarch64.cmake" "-DLLAMA_BUILD_COMMIT=$commit" -DLLAMA_BUILD_NUMBER=0 "$@"
LC_ALL=C NINJA_STATUS="[%f/%t] " ninja -C "$build" -j "${JOBS:-2}" llama-server llama-bench

cat >"$folder/$kind/llama-server.sh" <<END
#!/bin/sh
exec qemu-aarch64-static -cpu max -L /usr/aarch64-linux-gnu -E LD_LIBRARY_PATH=$libraries $build/bin/llama-server "\$@"
END
chmod +x "$folder/$kind/llama-server.sh"

"$python" - "$build/bin/llama-server" "$folder/$kind/llama-server.sh" <<'END'
import sys
from pathlib import Path

from edge.engine.binary import traits
from edge.engine.inspect import inspect
from edge.builder.smoke import smoke

found = traits(Path(sys.argv[1]))
print(f"{sys.argv[1]}: {found.machine}, CUDA {found.cuda}, machine code {found.built_for}, PTX {found.ptx}, no VMM {found.no_vmm}")
engine = inspect(Path(sys.argv[2]), None)
run = smoke(engine, gpu=False)
print(f"under qemu: {engine.version} {engine.commit}, devices {engine.devices}, ready after {run.ready_s} s, {run.tokens} tokens, {run.tokens_s} tok/s")
END
