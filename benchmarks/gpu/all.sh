#!/bin/sh
# Everything that is measured on a GPU, in three parts of at most nine minutes each.
#
#     benchmarks/gpu/all.sh [--dry-run] 1|2|3|parity [OUT_DIR]
#
# What is wanted most comes first, in each part and in each benchmark.
#
# Part 1: kernels' tests of what has not passed on a GPU yet, decode steps of an 8B model, an engine (overlap,
# first tokens, thousands of adapters), decode steps with another library for base products, and one load.
# Part 2: prompts, the low-rank update compared with that of other engines, and where a step's time goes, with
# four tokens a row as speculation verifies them.
# Part 3: the parity suite; whether kernels are compiled after the start; sampling, mixtures of experts and
# attention alone; rows alone and among others. In what time is left: all kernels' tests, quantised bases, and
# the demo if the libraries of the servers are installed.
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
DEVICE="--device cuda"
TINY=""
INTERPRET=""
PART_S=530
SLACK=1
if [ "${1:-}" = --dry-run ]; then
    shift
    SLACK=20 PART_S=7200 DEVICE="--device cpu" TINY="--tiny" INTERPRET="env TRITON_INTERPRET=1"
fi
PART="${1:-}"
OUT="${2:-${OUT:-benchmarks/results}}"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
missing=$("$PYTHON" -c "from importlib.util import find_spec
names = 'torch triton transformers peft safetensors msgspec llguidance'.split()
print(*[name for name in names if find_spec(name) is None])") || exit 99
if [ "$missing" ]; then
    echo "missing: $missing. Unpack their wheels in a folder and name it with PYTHONPATH." >&2
    exit 99
fi
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

# tests NAME LIMIT_S FOLDER...: in parallel, each test limited, a line for each; then the results of all.
tests() {
    name=$1 limit_s=$2
    shift 2
    if ! has pytest; then
        echo "== no pytest: the tests do not run"
        return
    fi
    options="-c benchmarks/gpu/pytest.ini --rootdir . --confcutdir tests/worker -q -p no:cacheprovider"
    options="$options --continue-on-collection-errors --durations 15 -rfE"
    has xdist && options="$options -n ${TEST_PROCESSES:-$(($(nproc) * 7 / 8))}"
    has pytest_timeout && options="$options --timeout 150"
    step "$limit_s" ${TEST_ENV:-} "$PYTHON" -m pytest $options --junitxml "$OUT/tests-$name.xml" "$@"
    step 20 "$PYTHON" -m benchmarks.gpu.verdict $DEVICE --out "$OUT" "$OUT"/tests-*.xml
}

gpu() { step "$1" "$PYTHON" -m "benchmarks.gpu.$2" $DEVICE $TINY --out "$OUT" $3; }
operators() { step "$1" $INTERPRET "$PYTHON" -m "benchmarks.gpu.$2" $DEVICE $TINY --out "$OUT" $3; }

kernels=tests/worker/ops/triton
case "$PART" in
1)
    if [ "$TINY" ]; then
        TEST_ENV=$INTERPRET TEST_PROCESSES=2
        tests new 60 $kernels/test_fused.py
    else
        step 10 nvidia-smi
        tests new 90 $(printf "$kernels/test_%s.py " long_runs coded_linear fused contract lora runner)
    fi
    gpu 170 decode ""
    gpu 110 engine ""
    # torch reads this variable. On an H200, products of 64 rows are faster with it; others are not known.
    step 70 env TORCH_BLAS_PREFER_CUBLASLT=1 \
        "$PYTHON" -m benchmarks.gpu.decode $DEVICE $TINY --out "$OUT/cublaslt"
    gpu 40 cold_load ""
    ;;
2)
    gpu 130 prefill ""
    operators 260 lora_ops "$PEERS"
    gpu 100 profile_step "--cases decode.64,.base|verify"
    ;;
3)
    files="gemma4 heads own_rope quantised gguf bfloat16 recurrent_bases parity runner merged_base unusual"
    files="$files demo_adapters published_layouts trainer_folders"
    [ "$TINY" ] && files=own_eos TEST_PROCESSES=2
    tests parity 130 $(printf 'tests/worker/parity/test_%s.py ' $files) $BY_BASE -m "not long" $DEVICE
    [ "$TINY" ] || tests compilations 160 $kernels/test_compilations.py  # one test for each process
    operators 50 sampling_moe ""
    operators 70 attention_ops ""
    gpu 60 row_bits "--cases ^wide|^llama --requests 24 --processes 4"
    [ "$TINY" ] || tests kernels 110 $kernels -m "not long" --deselect $kernels/test_compilations.py
    gpu 130 quantised ""
    # A whole stack with trained adapters, where the libraries of the servers are.
    has grpc_health && has starlette && step 90 "$PYTHON" -m demo.run
    ;;
parity)
    PART_S=7200
    tests parity 3600 tests/worker/parity $BY_BASE -m "not long" $DEVICE
    gpu 600 row_bits ""
    has grpc_health && has starlette && gpu 200 stack ""
    step 3600 "$PYTHON" -m tests.worker.parity.write_table $DEVICE --out "$OUT/parity.md" \
        $([ "$TINY" ] && echo llama)
    ;;
*)
    echo "usage: benchmarks/gpu/all.sh [--dry-run] 1|2|3|parity [OUT_DIR]" >&2
    exit 99
    ;;
esac
exit "$failed"
