#!/bin/sh
# Everything that is measured on a GPU, in three parts of at most nine minutes each.
#
#     benchmarks/gpu/all.sh [--dry-run] 1|2|3|parity [OUT_DIR]
#
# Part 1: the kernels' tests, decode steps of an 8B model (uneven contexts and the tax on the base among
# them), one cold load, and an engine (overlap, first tokens, thousands of adapters).
# Part 2: operators compared with those of other engines, prefill, and where a step's time goes, with four
# tokens a row as speculation verifies them.
# Part 3: sampling, mixtures of experts and attention alone; quantised bases; the demo, if the libraries of the
# servers are installed; some of the parity suite.
# `parity` runs the parity suite and writes its table, compares rows alone and among others, and times a
# whole stack; it needs half an hour on 16 cores.
# Results go to OUT_DIR, else to the folder that the environment names with OUT, else to
# benchmarks/results.
#
# --dry-run runs a part on a CPU, on a tiny base, kernels alone interpreted: to see that it runs at all.
# VLLM= and SGLANG= name folders that hold the package `vllm` or `sglang` (of a checkout of SGLang: its
# folder `python`); only the folders with their Triton kernels for LoRA are read. Results name commits.
# Needs Python 3.11 or later with torch >= 2.11, its triton, transformers, peft and what these bring, msgspec
# and llguidance; no network and no virtual environment (PYTHON= names the interpreter, and PYTHONPATH may
# name a folder of unpacked wheels). The tests run where pytest is, in parallel where pytest-xdist is. Every
# step has a limit, and what is left of the nine minutes is another; a failure does not stop the next step.
# At its limit a step is interrupted, so that tests still report those that ended. Results are written after
# every setting, and a setting that fails does not end the others. The exit status is the number of steps
# that failed.
set -u
cd "$(dirname "$0")/../.." || exit 99
PYTHON="${PYTHON:-python3}"
ON="--device cuda"
KERNELS=""
PART_S=530
SLACK=1
if [ "${1:-}" = --dry-run ]; then
    shift
    SLACK=20 PART_S=7200 ON="--device cpu --tiny" KERNELS="env TRITON_INTERPRET=1"
fi
PART="${1:-}"
OUT="${2:-${OUT:-benchmarks/results}}"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
PEERS="${VLLM:+--vllm $VLLM} ${SGLANG:+--sglang $SGLANG}"
mkdir -p "$OUT"
began_s=$(date +%s)
failed=0

# step LIMIT_S COMMAND...: run it for at most that long, or for what is left.
step() {
    limit_s=$(($1 * SLACK))
    shift
    left_s=$((PART_S + began_s - $(date +%s)))
    if [ "$left_s" -lt 10 ]; then
        echo "== no time left: $*"
        failed=$((failed + 1))
        return
    fi
    [ "$left_s" -lt "$limit_s" ] && limit_s=$left_s
    echo "== $*"
    begin_s=$(date +%s)
    timeout -s INT -k 15 "$limit_s" "$@" || { echo "== failed ($?): $*"; failed=$((failed + 1)); }
    echo "== $(($(date +%s) - begin_s)) s"
}

has() { "$PYTHON" -c "import $1" 2>/dev/null; }
BY_BASE=""
has xdist && BY_BASE="--dist loadscope"

# tests LIMIT_S FOLDER...: in parallel, each test limited, a line and a junit file for each.
tests() {
    limit_s=$1
    shift
    if ! has pytest; then
        echo "== no pytest: the tests do not run"
        return
    fi
    options="-c benchmarks/gpu/pytest.ini --rootdir . --confcutdir tests/worker -q -p no:cacheprovider"
    has xdist && options="$options -n ${TEST_PROCESSES:-8}"
    has pytest_timeout && options="$options --timeout 150"
    step "$limit_s" $KERNELS "$PYTHON" -m pytest $options --durations 15 -rfE \
        --junitxml "$OUT/tests-$PART.xml" "$@"
}

gpu() { step "$1" $KERNELS "$PYTHON" -m "benchmarks.gpu.$2" $ON --out "$OUT" $3; }

case "$PART" in
1)
    if [ "$KERNELS" ]; then
        TEST_PROCESSES=2 tests 60 tests/worker/ops/triton/test_fused.py
    else
        step 10 nvidia-smi
        tests 200 tests/worker/ops/triton
    fi
    KERNELS=""
    gpu 170 gpu_decode ""
    gpu 40 cold_load ""
    gpu 110 gpu_engine ""
    ;;
2)
    gpu 300 gpu_lora_ops "$PEERS"
    KERNELS=""
    gpu 100 prefill ""
    gpu 100 profile_step "--cases decode.64,.base|verify"
    ;;
3)
    gpu 60 sampling_moe ""
    gpu 75 attention_ops ""
    device=cuda
    [ "$KERNELS" ] && device=cpu
    KERNELS=""
    gpu 150 quantised ""
    files="test_parity test_recurrent_bases test_gemma4 test_heads"
    [ $device = cpu ] && files=test_own_eos TEST_PROCESSES=2
    # A whole stack with trained adapters, where the libraries of the servers are.
    has grpc_health && has starlette && step 90 "$PYTHON" -m demo.run
    tests 300 $(printf 'tests/worker/parity/%s.py ' $files) $BY_BASE -m "not long" --device $device
    ;;
parity)
    PART_S=7200
    device=cuda
    [ "$KERNELS" ] && device=cpu
    KERNELS=""
    tests 3600 tests/worker/parity $BY_BASE -m "not long" --device $device
    step 60 "$PYTHON" -m benchmarks.gpu.verdict --device $device --out "$OUT" "$OUT/tests-parity.xml"
    gpu 600 row_bits ""
    has grpc_health && has starlette && gpu 200 gpu_stack ""
    step 3600 "$PYTHON" -m tests.worker.parity.write_table --device $device --out "$OUT/parity.md" \
        $([ $device = cpu ] && echo llama)
    ;;
*)
    echo "usage: benchmarks/gpu/all.sh [--dry-run] 1|2|3|parity [OUT_DIR]" >&2
    exit 99
    ;;
esac
exit "$failed"
