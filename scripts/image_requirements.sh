#!/bin/sh
# Write the lists in deploy/docker/requirements anew, from pyproject.toml and constraints.txt.
#
# Each list has every package that an image or its build installs, with the hashes of its files, on Linux and on the
# Pythons that Loraplex supports. It needs uv (https://docs.astral.sh/uv) on PATH, and the network.
set -eu
cd "$(dirname "$0")/.."
folder=deploy/docker/requirements

compile() { # LIST ARGUMENT...
    list=$folder/$1.txt
    shift
    echo "image_requirements: $list" >&2
    UV_CUSTOM_COMPILE_COMMAND=scripts/image_requirements.sh uv pip compile --quiet --universal --python-version 3.11 \
        --generate-hashes --no-annotate --only-binary :all: --constraint constraints.txt --output-file "$list" "$@"
}

mkdir -p "$folder"
echo 'setuptools
cyclonedx-bom==7.5.0' | compile build -
compile gateway --extra gateway --extra tracing pyproject.toml
compile registry --extra registry pyproject.toml
compile worker-cuda --extra worker --extra tracing pyproject.toml
# The CPU image gets torch from PyTorch's index and nothing of CUDA. What torch needs besides is the same.
cuda=$(sed -nE 's/^(torch|triton|cuda-[a-z]+|nvidia-[a-z0-9-]+)[ =[].*/--no-emit-package \1/p' "$folder/worker-cuda.txt")
# shellcheck disable=SC2086 # the options are words
compile worker $cuda --extra worker --extra tracing pyproject.toml
