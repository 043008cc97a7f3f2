#!/bin/sh
# Run the given tests in an environment without torch: scripts/test_torch_free.sh PATH...
# PYTHON chooses the interpreter; each version has its own environment. Paths that this checkout
# does not have are left out.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
VENV=.venv-$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
export VENV PYTHON="$python" GOAL=test-torch-free
scripts/setup.sh torch-free
for path in "$@"; do
    shift
    [ ! -e "$path" ] || set -- "$@" "$path"
done
exec "$VENV/bin/pytest" "$@"
