#!/bin/sh
# Run a command with an emulated aarch64 Python: scripts/aarch64.sh -m pytest tests/worker/native
#
# For machines of another kind. The kernels are cross-compiled, so this needs Debian or Ubuntu and
# `apt-get install --no-install-recommends g++-aarch64-linux-gnu qemu-user`. Python comes from the
# archive of Debian or Ubuntu, torch and the rest from PyPI (500 MB to download, once).
#
# AARCH64      where all of that is kept; default: build/aarch64
# AARCH64_CPU  the processor; default: max, which has every instruction set; neoverse-n1 has no BF16.
set -eu
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || { sed -n '2,9s/^# \{0,1\}//p' "$0" >&2; exit 2; }

dir=${AARCH64:-build/aarch64}
mkdir -p "$dir"
dir=$(cd "$dir" && pwd)
root=$dir/root packages=$dir/packages
python=${VENV:-.venv}/bin/python
for tool in qemu-aarch64 aarch64-linux-gnu-g++; do
    command -v $tool >/dev/null || {
        echo "aarch64: $tool is missing; run:" >&2
        echo "apt-get install -y --no-install-recommends g++-aarch64-linux-gnu qemu-user" >&2
        exit 1
    }
done

# With lists and a status of its own, so that this system's packages stay as they are.
apt() {
    apt-get -qq -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o Debug::NoLocking=1 \
        -o Dir::State="$dir/apt" -o Dir::State::status="$dir/apt/status" -o Dir::Cache="$dir/apt" "$@"
}

make_root() {
    mkdir -p "$dir/apt/lists/partial" "$dir/apt/archives/partial"
    : >"$dir/apt/status"
    apt update
    apt install -y --no-install-recommends --download-only python3 libstdc++6 libgomp1
    for package in "$dir"/apt/archives/*.deb; do dpkg -x "$package" "$root.new"; done
    mv "$root.new" "$root"
    rm -r "$dir/apt"
}

# Torch 2.10 is the last whose wheel on PyPI is without CUDA.
install_packages() { # $1: the version of that Python
    set -- "$1" manylinux_2_28 manylinux_2_27 manylinux_2_26 manylinux_2_17 manylinux2014
    platforms=$(shift; printf ' --platform %s_aarch64' "$@")
    pip="$python -m pip install -q --upgrade --target $packages.new --python-version $1"
    # shellcheck disable=SC2086
    $pip $platforms --only-binary :all: --no-deps torch==2.10.0
    # shellcheck disable=SC2086
    $pip $platforms --only-binary :all: filelock fsspec grpcio grpcio-status hypothesis jinja2 msgspec \
        networkx numpy prometheus-client pytest pytest-asyncio pytest-timeout safetensors sympy typing-extensions
    ln -sfn "$PWD/services" "$packages.new/loraplex_services"
    mv "$packages.new" "$packages"
}

# Here, not under the emulator: it is slow, and does not survive that threads start processes.
build_kernels() {
    CXX=aarch64-linux-gnu-g++ "$python" -P - "$dir/cache/loraplex/native" <<'EOF'
import sys
from pathlib import Path

from loraplex_services.worker.native import build

build.library_dirs = lambda: [Path(sys.argv[1])]
for isa in ("neon_bf16", "neon"):
    print("aarch64:", build.build_library(isa))
EOF
}

version() { basename "$(find "$root/usr/bin" -name 'python3.?*' -type f | head -n 1)" | sed 's/^python//'; }

[ -e "$root" ] || make_root
[ -e "$packages" ] || install_packages "$(version)"
build_kernels

libraries=/lib/aarch64-linux-gnu:/usr/lib/aarch64-linux-gnu
CXX=aarch64-linux-gnu-g++ XDG_CACHE_HOME=$dir/cache PYTHONPATH=$PWD:$packages \
    exec qemu-aarch64 -cpu "${AARCH64_CPU:-max}" -L "$root" -E LD_LIBRARY_PATH=$libraries \
    -E PYTHONHOME="$root/usr" "$root/usr/bin/python$(version)" "$@"
