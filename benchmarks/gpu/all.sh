#!/bin/sh
# Everything that is measured on a GPU, in one go: tests, resources, decode, operators, loading.
#
#     benchmarks/gpu/all.sh [OUT_DIR]
#
# Needs Python 3.12 with torch >= 2.11, its triton, transformers, peft, safetensors and pytest; no
# network and no virtual environment (PYTHON= names the interpreter). Each part has its own limit and
# a failure of one does not stop the next; the exit status is the number of parts that failed.
set -u
cd "$(dirname "$0")/../.." || exit 1
PYTHON="${PYTHON:-python3}"
OUT="${1:-benchmarks/results}"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
mkdir -p "$OUT"
failed=0

part() {
    limit_s="$1"
    shift
    echo "== $*"
    timeout "$limit_s" "$@" || { echo "== failed ($?): $*"; failed=$((failed + 1)); }
}

part 20 nvidia-smi
part 90 "$PYTHON" -m pytest -c benchmarks/gpu/pytest.ini -q -p no:cacheprovider tests/worker/kernels/triton
part 150 "$PYTHON" -m benchmarks.gpu.gpu_decode --shape llama-3-8b --out "$OUT"
part 90 "$PYTHON" -m benchmarks.gpu.gpu_decode --shape llama-2-7b --steps 200 --out "$OUT"
part 100 "$PYTHON" -m benchmarks.gpu.gpu_lora_ops --out "$OUT"
part 40 "$PYTHON" -m benchmarks.gpu.cold_load --out "$OUT"
part 45 "$PYTHON" scripts/kernel_resources.py --target 90
exit "$failed"
