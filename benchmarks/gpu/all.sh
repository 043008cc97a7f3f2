#!/bin/sh
# Everything that is measured on a GPU, in one go: tests, decode, overlap, prefill, operators, the tables of
# the S-LoRA paper, loading.
#
#     benchmarks/gpu/all.sh [--dry-run] [OUT_DIR]
#
# --dry-run runs every part on a CPU, on a tiny base, kernels alone interpreted: to see that it runs at all.
# VLLM= and SGLANG= name checkouts that hold `vllm/` or `sglang/` (SGLang: its folder `python`), whose kernels
# then run beside ours; results name their commits.
# Needs Python 3.11 or later with torch >= 2.11, its triton, transformers, peft and what these bring; no
# network and no virtual environment (PYTHON= names the interpreter). For msgspec and llguidance, where
# they are missing, small files of `standins/` stand in; the tests run where pytest is. Each part has its
# own limit and a failure of one does not stop the next; the exit status is the number of parts that failed.
set -u
cd "$(dirname "$0")/../.." || exit 1
PYTHON="${PYTHON:-python3}"
ON="--device cuda"
OVERLAP="$ON --shape llama-3-8b --batch 64"
TESTS=tests/worker/kernels/triton
KERNELS=""
SLACK=1
if [ "${1:-}" = --dry-run ]; then
    shift
    SLACK=20 ON="--device cpu --tiny"
    KERNELS="env TRITON_INTERPRET=1" TESTS=tests/worker/kernels/triton/test_fused.py
    OVERLAP="--device cpu --shape tiny --batch 2 --steps 2 --arena-bytes 8388608"
fi
OUT="${1:-benchmarks/results}"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
"$PYTHON" -c 'import msgspec, llguidance' 2>/dev/null || PYTHONPATH="$PYTHONPATH:$PWD/benchmarks/gpu/standins"
PEERS="${VLLM:+--vllm $VLLM} ${SGLANG:+--sglang $SGLANG}"
mkdir -p "$OUT"
failed=0

part() {
    limit_s=$(($1 * SLACK))
    shift
    echo "== $*"
    timeout "$limit_s" "$@" || { echo "== failed ($?): $*"; failed=$((failed + 1)); }
}

[ "$KERNELS" ] || part 10 nvidia-smi
if "$PYTHON" -c 'import pytest' 2>/dev/null; then
    part 100 $KERNELS "$PYTHON" -m pytest -c benchmarks/gpu/pytest.ini --confcutdir tests/worker/kernels/triton \
        -q -p no:cacheprovider "$TESTS"
fi
part 130 "$PYTHON" -m benchmarks.gpu.gpu_decode $ON --shape llama-3-8b --out "$OUT"
part 45 "$PYTHON" -m benchmarks.overlap $OVERLAP --out "$OUT"
part 55 "$PYTHON" -m benchmarks.gpu.prefill $ON --out "$OUT"
part 60 $KERNELS "$PYTHON" -m benchmarks.gpu.gpu_lora_ops $ON --out "$OUT" $PEERS
part 60 "$PYTHON" -m benchmarks.gpu.slora_tables $ON --settings s2,s1 --out "$OUT"
part 30 "$PYTHON" -m benchmarks.gpu.cold_load $ON --out "$OUT"
part 40 "$PYTHON" -m benchmarks.gpu.gpu_decode $ON --shape llama-2-7b --steps 200 --out "$OUT"
exit "$failed"
