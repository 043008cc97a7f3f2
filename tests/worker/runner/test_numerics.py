"""Which device, dtype and number of threads a worker takes."""

import pytest
import torch

from loraplex.errors import InvalidRequest
from loraplex_services.worker.native import isa
from loraplex_services.worker.runner.numerics import (
    choose_threads,
    fingerprint,
    prefers_half,
    resolve_device,
    resolve_dtype,
)

CPU = torch.device("cpu")
MiB = 1024 * 1024


@pytest.mark.parametrize(
    ("weight_mib", "num_cores", "expected"), [(5, 64, 1), (64, 64, 2), (64, 1, 1), (16_000, 64, 64)]
)
def test_small_models_take_few_threads(weight_mib, num_cores, expected):
    assert choose_threads(weight_mib * MiB, num_cores) == expected


def test_auto_computes_in_float32_on_the_cpu_unless_half_precision_wins():
    assert resolve_dtype("auto", CPU) is torch.float32
    assert resolve_dtype("auto", CPU, True) is torch.bfloat16
    assert resolve_dtype("float32", CPU, True) is torch.float32
    assert resolve_dtype("auto", torch.device("cuda")) is torch.bfloat16


@pytest.fixture
def hosts(monkeypatch):
    """Pretend that the processor has these levels, best first."""

    def pretend(*names):
        monkeypatch.setattr(isa, "host_isas", lambda: names)

    return pretend


@pytest.mark.parametrize(
    ("cpu_isa", "levels"),
    [
        ("auto", ("amx", "avx512_bf16", "avx512", "avx2")),
        ("amx", ("amx", "avx512_bf16", "avx512", "avx2")),
        ("torch", ("amx", "avx512_bf16", "avx512", "avx2")),
        ("auto", ("avx512_bf16", "avx512", "avx2")),
        ("avx512_bf16", ("amx", "avx512_bf16", "avx512", "avx2")),
        ("avx2", ("amx", "avx512_bf16", "avx512", "avx2")),
        ("auto", ("avx2",)),
    ],
)
def test_half_precision_wins_where_it_has_faster_products_for_larger_bases_published_in_it(
    hosts, cpu_isa, levels
):
    hosts(*levels)
    assert prefers_half(64 * MiB, True, cpu_isa)
    assert not prefers_half(64 * MiB, False, cpu_isa)
    assert not prefers_half(3 * MiB, True, cpu_isa)


@pytest.mark.parametrize(
    ("cpu_isa", "levels"),
    [
        ("avx512", ("amx", "avx512_bf16", "avx512", "avx2")),
        ("auto", ("avx512", "avx2")),
        ("amx", ("avx512_bf16", "avx512", "avx2")),
        ("torch", ("avx512_bf16", "avx512", "avx2")),
        ("auto", ()),
    ],
)
def test_float32_wins_without_such_products_or_where_they_are_not_used(hosts, cpu_isa, levels):
    hosts(*levels)
    assert not prefers_half(64 * MiB, True, cpu_isa)


def test_unknown_names_are_refused_with_the_known_ones():
    with pytest.raises(InvalidRequest, match="bfloat16"):
        resolve_dtype("fp8", CPU)
    with pytest.raises(InvalidRequest, match="auto, cpu or cuda"):
        resolve_device("xpu")


def test_a_cuda_device_that_is_not_there_is_refused_with_the_way_out(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for version, way_out in ((None, "install a CUDA build of torch"), ("13.0", "NVIDIA's driver")):
        monkeypatch.setattr(torch.version, "cuda", version)
        with pytest.raises(InvalidRequest, match=f"no CUDA device.*{way_out}") as caught:
            resolve_device("cuda")
        assert caught.value.violations[0].field == "device"


def test_fingerprints_tell_dtypes_and_bases_apart():
    names = [
        fingerprint("a", CPU, torch.float32, "torch"),
        fingerprint("b", CPU, torch.float32, "torch"),
        fingerprint("a", CPU, torch.bfloat16, "torch"),
        fingerprint("a", CPU, torch.float32, "native-avx2"),
    ]
    assert len(set(names)) == 4
    assert fingerprint("a", CPU, torch.float32, "torch") == names[0]
