#!/bin/sh
# Everything that is measured on a GPU, in one go: tests, decode, overlap, prefill, operators, the tables of
# the S-LoRA paper, loading.
#
#     benchmarks/gpu/all.sh [OUT_DIR]
#
# VLLM= and SGLANG= name checkouts that hold `vllm/` or `sglang/` (SGLang: its folder `python`), whose kernels
# then run beside ours; results name their commits.
# Needs Python 3.11 or later with torch >= 2.11, its triton, transformers, peft and what these bring; no
# network and no virtual environment (PYTHON= names the interpreter). For msgspec and llguidance, where
# they are missing, small files of `standins/` stand in; the tests run where pytest is. Each part has its
# own limit and a failure of one does not stop the next; the exit status is the number of parts that failed.
set -u
cd "$(dirname "$0")/../.." || exit 1
PYTHON="${PYTHON:-python3}"
OUT="${1:-benchmarks/results}"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
"$PYTHON" -c 'import msgspec, llguidance' 2>/dev/null || PYTHONPATH="$PYTHONPATH:$PWD/benchmarks/gpu/standins"
PEERS="${VLLM:+--vllm $VLLM} ${SGLANG:+--sglang $SGLANG}"
mkdir -p "$OUT"
failed=0

part() {
    limit_s="$1"
    shift
    echo "== $*"
    timeout "$limit_s" "$@" || { echo "== failed ($?): $*"; failed=$((failed + 1)); }
}

part 10 nvidia-smi
if "$PYTHON" -c 'import pytest' 2>/dev/null; then
    part 100 "$PYTHON" -m pytest -c benchmarks/gpu/pytest.ini --confcutdir tests/worker/kernels/triton \
        -q -p no:cacheprovider tests/worker/kernels/triton
fi
part 130 "$PYTHON" -m benchmarks.gpu.gpu_decode --shape llama-3-8b --out "$OUT"
part 45 "$PYTHON" -m benchmarks.overlap --device cuda --shape llama-3-8b --batch 64 --out "$OUT"
part 55 "$PYTHON" -m benchmarks.gpu.prefill --out "$OUT"
part 60 "$PYTHON" -m benchmarks.gpu.gpu_lora_ops --out "$OUT" $PEERS
part 60 "$PYTHON" -m benchmarks.gpu.slora_tables --settings s2,s1 --out "$OUT"
part 30 "$PYTHON" -m benchmarks.gpu.cold_load --out "$OUT"
part 40 "$PYTHON" -m benchmarks.gpu.gpu_decode --shape llama-2-7b --steps 200 --out "$OUT"
exit "$failed"
