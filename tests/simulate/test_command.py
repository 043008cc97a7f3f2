"""`loraplex simulate`, and as a process where that makes a difference."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from loraplex_services.simulate.__main__ import main
from tests.simulate.fleets import COSTS

SHORT = (
    "--adapters",
    "5",
    "--rate",
    "20",
    "--duration",
    "2",
    "--lengths",
    "8-32,2-8",
    "--arrivals",
    "pooled",
)


@pytest.fixture
def costs(tmp_path: Path) -> str:
    path = tmp_path / "costs.json"
    path.write_text(COSTS.to_json())
    return str(path)


def simulate(*args: str) -> subprocess.CompletedProcess[str]:
    """In this process."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["simulate", *args])
        patch.setenv("GRPC_VERBOSITY", "ERROR")  # which it would set for good
        try:
            code = main()
        except SystemExit as end:  # of argparse
            assert isinstance(end.code, int)
            code = end.code
    return subprocess.CompletedProcess(args, code, out.getvalue(), err.getvalue())


def run_command(*args: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "loraplex.cli.loraplex", "simulate", *args]
    env = {**os.environ, **environ}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)


def test_json_holds_the_figures_and_is_the_same_every_time(costs: str) -> None:
    runs = [run_command("--costs", costs, *SHORT, "--json") for _ in range(2)]
    assert runs[0].returncode == 0, runs[0].stderr
    result = json.loads(runs[0].stdout)
    assert result["num_finished"] == result["num_requests"] == 40
    assert result["attainment"] == 1.0 and result["loads"] == 5
    assert runs[0].stdout == runs[1].stdout


def test_a_roofline_is_named_instead_of_a_file_and_brings_its_memory() -> None:
    done = simulate("--costs", "llama-7b@a10g", *SHORT, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["num_finished"] == 40


def test_requests_that_do_not_fit_into_the_memory_fail_with_a_reason() -> None:
    """Also those that come after the first one for an adapter that is too large."""
    small = ("--costs", "llama-7b@a10g", "--kv-memory", "32MiB", "--ranks", "64")
    done = simulate(*small, *SHORT)
    assert done.returncode == 0, done.stderr
    assert "finished      0 of 40 requests" in done.stdout
    assert "failures      40 ADAPTER_TOO_LARGE" in done.stdout


def test_time_outside_the_engine_comes_on_top(costs: str) -> None:
    done, added = (
        json.loads(simulate("--costs", costs, *SHORT, "--direct", "--json", *more).stdout)
        for more in ((), ("--outside", "1s"))
    )
    more_s = added["first_token"]["mean_s"] - done["first_token"]["mean_s"]
    assert more_s == pytest.approx(1.0)


def test_the_table_names_the_figures(costs: str) -> None:
    done = simulate("--costs", costs, *SHORT, "--cluster-size", "2", "--workers", "2")
    assert done.returncode == 0, done.stderr
    for word in ("throughput", "attainment", "satisfaction", "first token", "P99"):
        assert word in done.stdout


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--lengths", "9-3,1-2"), "inputs"),
        (("--lengths", "long"), "--lengths"),
        (("--ranks", "S9"), "--ranks"),
        (("--ranks", "5000000"), "--ranks"),
        (("--save-costs", "costs.json"), "--save-costs"),
        (("--workers", "0"), "--workers"),
        (("--kv-memory", "1"), "--kv-memory"),
        (("--cv", "0"), "cv"),
        (("--outside", "9ms,6ms"), "--outside"),
        (("--costs", "llama-7b@h100"), "one of llama-7b@a10g, "),
    ],
)
def test_wrong_flags_are_refused_by_name(costs: str, flags: tuple[str, ...], named: str) -> None:
    done = simulate("--costs", costs, *SHORT, *flags)
    assert done.returncode != 0
    assert named in done.stderr and "Traceback" not in done.stderr


def test_a_missing_scheduler_is_named_with_the_way_to_get_it(costs: str, tmp_path: Path) -> None:
    (tmp_path / "msgspec.py").write_text("raise ModuleNotFoundError(name='msgspec')")
    done = run_command("--costs", costs, PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    assert "msgspec is not installed" in done.stderr and "worker-core" in done.stderr


def test_help_loads_no_engine_and_a_gateway_is_accepted() -> None:
    code = (
        "import sys, loraplex_services.simulate.__main__ as m\n"
        "parser = m.make_parser()\n"
        "assert 'loraplex_services.worker.engine.engine' not in sys.modules\n"
        "parser.parse_args(['--costs', 'costs.json', '--gateway', '127.0.0.1:1'])\n"
        "print(parser.format_help())"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "--costs" in shown.stdout, shown.stderr


def test_a_log_of_requests_is_simulated_with_its_models_as_adapters(
    costs: str, tmp_path: Path
) -> None:
    rows = [f"{1000 + 10 * i},model-{i % 3},{8 + i},4" for i in range(30)]
    log = tmp_path / "log.csv"
    log.write_text("\n".join(["timestamp,model,input_length,output_length", *rows]))
    flags = ("--costs", costs, "--trace", str(log), "--rate", "10", "--duration", "2", "--json")
    done = simulate(*flags)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["num_finished"] == 20 and result["loads"] == 3
    refused = simulate(*flags, "--cv", "2")
    assert refused.returncode == 2 or "--cv" in refused.stderr
    assert "--trace" in refused.stderr
