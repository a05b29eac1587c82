#!/bin/sh
# Build the native modules for aarch64 and run the kernels' tests on an emulated processor.
#
#     aarch64.sh PYTHON [pytest's options]
#
# PYTHON is this machine's: it drives the build. The tests run on an aarch64 Python that the first run fetches.
set -eu
python=$1
shift
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.."
folder=$PWD/build/aarch64

emulator=$(command -v qemu-aarch64 || command -v qemu-aarch64-static || true)
missing=
[ -n "$emulator" ] || missing="$missing qemu-user"
command -v aarch64-linux-gnu-g++ >/dev/null || missing="$missing g++-aarch64-linux-gnu"
command -v apt-get >/dev/null || missing="$missing apt"
command -v dpkg-deb >/dev/null || missing="$missing dpkg"
if [ -n "$missing" ]; then
    echo "The tests for aarch64 need, by Debian's names:$missing. As root: apt-get install$missing" >&2
    exit 1
fi

if [ ! -e "$folder/.fetched" ]; then
    PYTHON=$python "$here/aarch64-python.sh" "$folder"
    touch "$folder/.fetched"
fi

cmake -S . -B "$folder/build" -DCMAKE_BUILD_TYPE=Release -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
    -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DCMAKE_CXX_FLAGS="-I$folder/include" \
    -DPython_EXECUTABLE="$(realpath -s "$python")" -DPython_INCLUDE_DIR="$(realpath "$folder/include/python")" \
    -Dnanobind_DIR="$("$python" -m nanobind --cmake_dir)" >"$folder/configure.log" 2>&1 || {
    cat "$folder/configure.log" >&2
    exit 1
}
cmake --build "$folder/build" --parallel "${JOBS:-$(getconf _NPROCESSORS_ONLN)}" --target _cpu _sampler

# Kernels alone: what else is tested in Python is the same on every processor, and slow on an emulated one.
tests=
for name in arrangement attention attention_invariance elementwise embedding experts float_linear indexing \
    integer_linear matmul reductions rotary rows step_sizes; do
    tests="$tests tests/runtime/backends/cpu/test_$name.py"
done
interpreter=$(realpath "$folder"/root/usr/bin/python3)
# shellcheck disable=SC2086  # a list of files
QEMU_LD_PREFIX=$folder/root QEMU_CPU=max PYTHONPATH=$folder/site:build/typing INFERENCEX_NATIVE_BUILD=$folder/build \
    OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 \
    exec "$emulator" "$interpreter" -m pytest -p tests.native.other_build -p no:cacheprovider $tests \
    tests/native/test_pool.py "$@"
