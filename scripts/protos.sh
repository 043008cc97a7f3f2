#!/bin/sh
# Generate loraplex/v1 from protos/loraplex/v1 (write), or compare the two (check).
# The proto package path is the Python package path, so generated imports need no rewriting.
set -eu
cd "$(dirname "$0")/.."

generate() { # $1: output folder
    .venv/bin/python -m grpc_tools.protoc -I protos \
        --python_out="$1" --pyi_out="$1" --grpc_python_out="$1" protos/loraplex/v1/*.proto
    for stub in "$1"/loraplex/v1/*_pb2_grpc.py; do
        # Half of such a file is a second API for calls, which is marked as experimental. It is the
        # last part, since a proto has one service at most.
        awk '/^ # This class is part of an EXPERIMENTAL API/ { exit }
             !NF { blank = blank "\n"; next }
             { printf "%s%s\n", blank, $0; blank = "" }' "$stub" >"$stub.cut"
        mv "$stub.cut" "$stub"
    done
    rm "$1/loraplex/v1/common_pb2_grpc.py" # it has no service
}

case ${1:-} in
    write) generate . ;;
    check)
        fresh=$(mktemp -d)
        trap 'rm -rf "$fresh"' EXIT
        generate "$fresh"
        for stub in "$fresh"/loraplex/v1/*_pb2* loraplex/v1/*_pb2*; do
            name=${stub##*/}
            cmp -s "$fresh/loraplex/v1/$name" "loraplex/v1/$name" ||
                { echo "protos: loraplex/v1/$name is stale; run make protos" >&2; exit 1; }
        done ;;
    *) echo "usage: scripts/protos.sh write|check" >&2; exit 2 ;;
esac
