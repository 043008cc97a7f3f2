#!/bin/sh
# Make or complete the virtual environment; does nothing where it is already up to date.
#
#   scripts/setup.sh GROUP...   groups: run, test, dev (each needs run), torch-free
#
# PYTHON           interpreter to use; default: the newest of 3.11-3.14 found
# TORCH            cpu or cuda; default: kept if importable, else what this machine can use
# TORCH_CPU_INDEX  where the CPU build is looked for when pip's own configuration has none
# VENV             the environment's folder, default .venv
# Proxies, mirrors and CA files are pip's own settings (PIP_INDEX_URL, PIP_FIND_LINKS, PIP_CERT...).
set -eu
cd "$(dirname "$0")/.."

venv=${VENV:-.venv}
stamp=$venv/loraplex-setup
log=$venv/setup.log
kernels_log=$venv/kernels.log
torch_version=2.13.0
cpu_index=${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}
cuda_size='2.6 GB to download'
retry="make ${GOAL:-setup}"

say() { echo "setup: $*" >&2; }
fail() { say "$@"; exit 1; }

# --- what is wanted, and is it there already

# The stamp has one line for the place, one for the torch build, and one for each group with a
# checksum of what it was installed from. It is written last, so an interrupted set-up has none.
stamped() { grep -qx "$1" "$stamp" 2>/dev/null; }
inputs() { cat pyproject.toml constraints.txt scripts/setup.sh | cksum | tr ' ' '-'; }
venv_works() { stamped "place $PWD/$venv" && "$venv/bin/python" -c '' 2>/dev/null; }

torch_suits() {
    case ${TORCH:-} in
        cuda) ! grep -q '^torch .*+cpu$' "$stamp" ;;
        cpu) [ "$(uname -s)" != Linux ] || grep -q '^torch .*+cpu$' "$stamp" ;;
    esac
}

up_to_date() {
    venv_works && same_python && { [ "$torch_free" ] || torch_suits; } || return 1
    for group in "$@"; do stamped "$group $(inputs)" || return 1; done
}

# --- Python

describe() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }
supported() { case $(describe "$1") in 3.11 | 3.12 | 3.13 | 3.14) ;; *) return 1 ;; esac; }
has_venv() { "$1" -c 'import ensurepip, venv' 2>/dev/null; }

# An environment made with another Python than the one asked for by PYTHON= is not the wanted one.
same_python() {
    [ -z "${PYTHON:-}" ] || [ "$(describe "$PYTHON")" = "$(describe "$venv/bin/python")" ]
}

# Print the interpreters that could be used, newest first, one for each version.
find_pythons() {
    if [ -n "${PYTHON:-}" ]; then
        supported "$PYTHON" || fail "PYTHON=$PYTHON is not a working Python 3.11-3.14"
        echo "$PYTHON"
        return
    fi
    seen=
    for name in python3.14 python3.13 python3.12 python3.11 python3 python; do
        supported "$name" || continue
        version=$(describe "$name")
        case $seen in *"$version"*) continue ;; esac
        seen="$seen $version"
        echo "$name"
    done
}

# Say the one line that gives this machine the missing piece, and stop.
stop_without_venv() { # $1: an interpreter without the venv module, or nothing
    package=python3-venv
    [ -z "$1" ] || [ "$(describe "$1")" = "$(describe python3)" ] || package=python$(describe "$1")-venv
    sudo=
    [ "$(id -u)" = 0 ] || sudo='sudo '
    if [ -n "$1" ]; then
        say "Python $(describe "$1") has no venv module; run:"
    else
        say "no Python 3.11-3.14 found; name one with PYTHON=, or on Debian 12 or Ubuntu 24.04 run:"
    fi
    echo "${sudo}apt-get install -y $package" >&2
    exit 1
}

# --- pip

# pip's own words go to the log; they are shown where it fails. To compile every module of every
# package would take longer than all else here: keep_bytecode is for those that are imported.
pip_install() {
    "$venv/bin/python" -m pip install --disable-pip-version-check --no-compile "$@" >>"$log" 2>&1
}

make_venv() { # $1: interpreter
    rm -rf "$venv"
    say "making $venv with Python $(describe "$1")"
    "$1" -m venv "$venv"
    : >"$log"
    # Older ones need twice the time to find the packages, but do.
    pip_install --retries 1 --timeout 15 'pip>=25' || true
}

# --- torch

installed_torch() { "$venv/bin/python" -c 'import torch; print(torch.__version__)' 2>/dev/null; }

torch_build() {
    case ${TORCH:-} in
        cpu | cuda) echo "$TORCH" ;;
        *) if nvidia-smi -L >/dev/null 2>&1; then echo cuda; else echo cpu; fi ;;
    esac
}

# Torch itself only: what it depends on comes from the ordinary index with everything else.
install_torch() { # $1: cpu or cuda; fails where the CPU build cannot be had
    if [ "$(uname -s)" = Darwin ] || [ "$1" = cuda ]; then
        size=
        [ "$1" = cpu ] || size=" for CUDA ($cuda_size)"
        say "installing torch $torch_version$size"
        pip_install --no-deps --force-reinstall "torch==$torch_version" || stop_with_log torch
        return
    fi
    say "installing torch $torch_version+cpu (about 190 MB)"
    pip_install --no-deps "torch==$torch_version+cpu" ||
        pip_install --no-deps --retries 1 --timeout 15 --index-url "$cpu_index" \
            "torch==$torch_version+cpu"
}

stop_with_log() { # $1: what was being installed
    say "pip could not install $1; its last words ($log):"
    tail -n 15 "$log" >&2
    exit 1
}

stop_without_torch() { # $1: the versions tried
    say "no CPU build of torch $torch_version for Python$1; pip's last words ($log):"
    # The errors say that there is no such version, and only a warning why an index did not answer.
    grep 'WARNING: Retrying' "$log" | tail -n 1 >&2 || true
    grep -v WARNING "$log" | tail -n 3 >&2
    say "looked in pip's own configuration and $cpu_index"
    say "name another place with TORCH_CPU_INDEX=URL or PIP_FIND_LINKS=DIR, or accept the CUDA build"
    say "($cuda_size), which runs on a CPU too: TORCH=cuda $retry"
    exit 1
}

# --- the steps

# Leave $venv with a Python that has the right torch. A newer Python whose CPU torch cannot be had
# gives way to an older one that pip can serve.
provide_venv() {
    build=$(torch_build)
    if venv_works && same_python; then
        installed_torch >/dev/null && torch_suits && return
        [ "$torch_free" ] || install_torch "$build" || stop_without_torch " $(describe "$venv/bin/python")"
        return
    fi
    pythons=$(find_pythons)
    [ ! -e "$venv" ] || say "$venv is not a finished set-up of this folder; making it anew"
    tried= without_venv=
    for python in $pythons; do
        has_venv "$python" || { without_venv=${without_venv:-$python}; continue; }
        [ -z "$tried" ] || say "no CPU build of torch for Python$tried; trying Python $(describe "$python")"
        make_venv "$python"
        if [ "$torch_free" ] || install_torch "$build"; then return; fi
        tried="$tried $(describe "$python")"
    done
    [ -z "$tried" ] || stop_without_torch "$tried"
    stop_without_venv "$without_venv"
}

# A torch that was kept is not moved to our pin, nor is the triton that belongs to it.
write_constraints() { # $1: the installed torch or nothing
    case $1 in
        '' | $torch_version | $torch_version+*) cat constraints.txt ;;
        *) grep -v -e '^torch==' -e '^triton==' constraints.txt; echo "torch==$1" ;;
    esac >"$venv/constraints.txt"
}

write_stamp() { # $1: torch version or nothing, then the groups
    torch=$1
    shift
    {
        echo "place $PWD/$venv"
        [ -z "$torch" ] || echo "torch $torch"
        for group in "$@"; do echo "$group $(inputs)"; done
        for group in run test dev; do
            case " $* " in *" $group "*) ;; *) grep "^$group " "$stamp" 2>/dev/null || true ;; esac
        done
    } >"$stamp.new"
    mv "$stamp.new" "$stamp"
}

# The names are those of services/worker/native/build.py.
has_compiler() {
    for name in ${CXX:-} g++ clang++ c++; do
        ! command -v "$name" >/dev/null 2>&1 || return 0
    done
    return 1
}

# Linux on x86-64 and on aarch64 has kernels to compile.
needs_compiler() {
    case $(uname -s)-$(uname -m) in
        Linux-x86_64 | Linux-aarch64) [ -z "$torch_free" ] && ! has_compiler ;;
        *) return 1 ;;
    esac
}

# Compiled kernels make a CPU worker several times faster. Without them it computes with torch.
# `make test` tests those of the two best instruction sets that this machine has.
build_kernels() { # $@: the groups
    case " $* " in *" test "*) which='--best 2' ;; *) which= ;; esac
    "$venv/bin/python" -m loraplex_services.worker.native.build $which >"$kernels_log" 2>&1 ||
        say "could not compile the CPU kernels (see $kernels_log): workers compute with torch alone, slower"
}

collect() { "$venv/bin/pytest" --collect-only -qq -p no:cacheprovider "$@" >>"$log" 2>&1; }

# Import what services, and tests, import, so that later starts find it compiled.
keep_bytecode() { # $@: the groups
    modules=loraplex_services.gateway.__main__,loraplex_services.registry.__main__
    [ "$torch_free" ] || modules=$modules,loraplex_services.worker.runner.building
    case " $* " in
        *" test "*)
            # Each process of `make test` would compile the same tests at the same time. To collect
            # them imports what services import, too. The two parts have little in common.
            collect tests/gateway tests/registry &
            collect --ignore tests/gateway --ignore tests/registry || true
            modules=model_signing
            ;;
    esac
    "$venv/bin/python" -c "import $modules" >>"$log" 2>&1 || true
}

[ $# -gt 0 ] || { say "name what to set up: run, test, dev or torch-free"; exit 2; }
torch_free= extras=
for group in "$@"; do
    case $group in
        run) extras="$extras,worker,stack" ;;
        test | dev) extras="$extras,worker,stack,$group" ;;
        torch-free) torch_free=yes extras="stack,test-lite" ;;
        *) say "unknown group $group; use run, test, dev or torch-free"; exit 2 ;;
    esac
done

case ${TORCH:-} in '' | cpu | cuda) ;; *) say "TORCH=$TORCH is unknown; use cpu or cuda"; exit 2 ;; esac

! up_to_date "$@" || exit 0
unset PYTHONDONTWRITEBYTECODE # the environment is ours; see keep_bytecode
provide_venv
torch=
[ "$torch_free" ] || torch=$(installed_torch) || true
write_constraints "$torch"
say "installing packages for: $*"
compiler=
if needs_compiler; then
    say "no C++ compiler here, so the package ziglang comes too (100 MB)"
    compiler=,compiler
elif [ -z "$torch_free" ]; then
    build_kernels "$@" & # which needs no package
fi
pip_install -c "$venv/constraints.txt" -e ".[${extras#,}$compiler]" || stop_with_log "the packages"
[ -z "$compiler" ] || build_kernels "$@"
[ "$torch_free" ] || torch=$(installed_torch) || stop_with_log torch
keep_bytecode "$@"
wait
write_stamp "$torch" "$@"
say "ready: Python $(describe "$venv/bin/python")${torch:+, torch $torch}, in $venv"
