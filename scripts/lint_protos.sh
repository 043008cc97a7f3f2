#!/bin/sh
# Lint the protos and refuse a change that breaks clients of the last release, where buf is at hand.
set -eu
cd "$(dirname "$0")/.."
command -v buf >/dev/null || { echo "buf not found: proto lint and breaking check left out" >&2; exit 0; }
buf lint
released=$(git describe --tags --abbrev=0 --match 'v*' 2>/dev/null || echo HEAD)
buf breaking --against ".git#ref=$released"
