#!/bin/sh
# Build, push or list the container images, every tag that an overlay of deploy/k8s names.
#
#   scripts/images.sh build [TAG]...   all, or those named, such as loraplex-worker:0.1.0-cuda
#   scripts/images.sh push REGISTRY    tag what was built as REGISTRY/NAME:VERSION and push it
#   scripts/images.sh list             one tag a line
#
# BUILDER        docker, podman or buildah; default: the first that works
# PYTHON_IMAGE   the image to build from; default: the Dockerfiles' public slim image
# BUILD_FLAGS    more options for every build, such as --build-arg TORCH_INDEX=URL or --volume DIR:DIR:ro
set -eu
cd "$(dirname "$0")/.."
version=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' loraplex/__init__.py)

# One line for each image: tag, Dockerfile, build arguments.
table() {
    echo "loraplex-registry:$version registry"
    echo "loraplex-gateway:$version gateway"
    echo "loraplex-worker:$version worker"
    # Triton compiles its launchers as it runs: the CUDA image holds a compiler.
    echo "loraplex-worker:$version-cuda worker REQUIREMENTS=worker-cuda TORCH=" \
        "RUNTIME_PACKAGES=gcc,libc6-dev"
}

works() {
    case $1 in
        buildah) buildah --version ;;
        *) "$1" info ;;
    esac >/dev/null 2>&1
}

choose_builder() {
    for builder in ${BUILDER:-docker podman buildah}; do
        works "$builder" && return
    done
    echo "images: none of ${BUILDER:-docker, podman and buildah} works here; install one, or start its daemon" >&2
    exit 1
}

build_one() { # TAG DOCKERFILE ARGUMENT...
    tag=$1 file=deploy/docker/$2.Dockerfile
    shift 2
    flags=${PYTHON_IMAGE:+--build-arg PYTHON_IMAGE=$PYTHON_IMAGE}
    for argument in "$@"; do flags="$flags --build-arg $argument"; done
    # Only the docker format keeps a HEALTHCHECK.
    case $builder in docker) format= ;; *) format="--format docker" ;; esac
    echo "images: building $tag with $builder" >&2
    # shellcheck disable=SC2086 # the flags are words
    "$builder" build $format $flags ${BUILD_FLAGS:-} -f "$file" -t "$tag" .
}

build() {
    choose_builder
    for tag in "$@"; do
        table | grep -q "^$tag " || { echo "images: $tag is not one of: $(list | tr '\n' ' ')" >&2; exit 2; }
    done
    table | while read -r tag words; do
        # shellcheck disable=SC2086
        case " $* " in "  " | *" $tag "*) build_one "$tag" $words </dev/null ;; esac
    done
}

push() { # REGISTRY
    choose_builder
    list | while read -r tag; do
        "$builder" tag "$tag" "$1/$tag"
        "$builder" push "$1/$tag"
    done
}

list() { table | cut -d' ' -f1; }

command=${1:-}
[ $# -eq 0 ] || shift
case $command in
    build) build "$@" ;;
    push) [ $# -eq 1 ] || { echo "images: push takes one REGISTRY, such as ghcr.io/my-org" >&2; exit 2; }; push "$1" ;;
    list) list ;;
    *) sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
