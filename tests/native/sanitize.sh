#!/bin/sh
# Build the native modules with sanitizers, in a folder of their own, and run tests with them.
#
#     sanitize.sh memory|threads PYTHON [pytest's options]
#
# Memory: AddressSanitizer and UndefinedBehaviorSanitizer; threads: ThreadSanitizer. CXX says which compiler.
set -eu
kind=$1 python=$2
shift 2
cd "$(dirname "$0")/../.."
cxx=${CXX:-c++}
folder=build/sanitize-$kind

case $kind in
memory)
    sanitizers=address,undefined,float-cast-overflow
    libraries='libasan.so libubsan.so'
    set -- tests/runtime/backends/cpu tests/runtime/engine/test_choose_tokens.py "$@"
    ;;
threads)
    kernels=$(printf "tests/runtime/backends/cpu/test_%s.py " experts integer_linear float_linear attention attention_invariance rows step_sizes page_work)
    sanitizers=thread
    libraries=libtsan.so
    set -- tests/native/test_pool.py $kernels "$@"
    ;;
*)
    echo "sanitize.sh: '$kind' is neither memory nor threads" >&2
    exit 2
    ;;
esac

# The interpreter is not built with sanitizers, so their libraries have to be there before it; the C++ library too,
# whose exceptions they watch.
preload=
for library in $libraries libstdc++.so.6; do
    path=$("$cxx" -print-file-name="$library")
    case $path in
    /*) preload="$preload $path" ;;
    *)
        echo "$cxx has no $library; sanitizers need g++ and its libraries (set CXX)" >&2
        exit 1
        ;;
    esac
done

mkdir -p build
cmake -S . -B "$folder" -DCMAKE_BUILD_TYPE=None -DCMAKE_CXX_COMPILER="$cxx" -DPython_EXECUTABLE="$(realpath -s "$python")" \
    -Dnanobind_DIR="$("$python" -m nanobind --cmake_dir)" -DINFERENCEX_SANITIZE=$sanitizers >"$folder.log" 2>&1 || {
    cat "$folder.log" >&2
    exit 1
}
cmake --build "$folder" --parallel "${JOBS:-$(getconf _NPROCESSORS_ONLN)}" --target _cpu _sampler

# Reports go to the terminal, past pytest's capture, since a finding ends the process that would show what it captured.
# Leaks are not looked for: the interpreter keeps memory until its end. What asks for absurd amounts gets an error.
LD_PRELOAD=$preload INFERENCEX_NATIVE_BUILD=$folder \
    ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1 \
    TSAN_OPTIONS=halt_on_error=1:exitcode=66 \
    PYTHONMALLOC=malloc OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false \
    exec "$python" -m pytest -p tests.native.other_build -p no:cacheprovider --capture=sys "$@"
