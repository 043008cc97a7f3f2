"""`loraplex top`: a screen of rates, percentiles, errors, workers and the adapters in use."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from loraplex.cli.clients import gateway_client
from loraplex.cli.output import print_json, table_lines
from loraplex.cli.parsing import Commands, count, seconds
from loraplex.cli.status import state_of, status_object
from loraplex.units import counted

if TYPE_CHECKING:
    from collections.abc import Callable

    from loraplex.api.load import ModelLoad, RecentLoad
    from loraplex.cli.keyboard import Keyboard
    from loraplex.client.generation import Status, WorkerStatus

SHOW_FROM_TOP, CLEAR_REST = "\x1b[H", "\x1b[J"
CLEAR_LINE = "\x1b[K"
_ORDERS: dict[str, tuple[str, Callable[[ModelLoad], Any]]] = {
    "t": ("tokens", lambda model: (-model.generated_tokens, model.model)),
    "r": ("requests", lambda model: (-model.requests, model.model)),
    "e": ("errors", lambda model: (-model.errors, model.model)),
    "n": ("name", lambda model: model.model),
}
_KEYS = "keys: t tokens, r requests, e errors, n name, q quit"
_NUM_LINES_PIPED = 40
MIN_INTERVAL_S = 0.1


def add(commands: Commands) -> None:
    parser = commands.add(
        "top",
        _top,
        "Watch rates, latency, errors, workers and adapters in use, until interrupted.",
        "loraplex top --interval 5s --sort errors",
    )
    parser.add_argument(
        "--interval",
        type=_interval,
        default=2.0,
        metavar="TIME",
        help="time between two updates (default: 2s)",
    )
    parser.add_argument(
        "--count", type=count, metavar="N", default=0, help="stop after N updates (default: never)"
    )
    parser.add_argument(
        "--sort",
        choices=[name for name, _ in _ORDERS.values()],
        default="tokens",
        help="order of the adapters (default: tokens)",
    )


def _interval(text: str) -> float:
    """A time between two questions to the gateway, which bounds how often it is asked."""
    if (interval_s := seconds(text)) < MIN_INTERVAL_S:
        raise argparse.ArgumentTypeError(f"expected a time of at least 100ms, got {text!r}")
    return interval_s


async def _top(args: argparse.Namespace) -> None:
    import shutil

    from loraplex.cli.keyboard import Keyboard

    key = next(key for key, (name, _) in _ORDERS.items() if name == args.sort)
    num_shown = 0
    async with gateway_client(args) as client:
        with Keyboard() as keyboard:
            while True:
                status = await client.status(include_adapters=args.json)
                num_shown += 1
                size = shutil.get_terminal_size()
                if args.json:
                    print_json(status_object(status))
                elif sys.stdout.isatty():
                    _draw(screen(status, key, size.columns, size.lines - 1))
                else:
                    print("\n".join(screen(status, key, 0, _NUM_LINES_PIPED)), flush=True)
                if num_shown == args.count:
                    return
                key = await _next_key(keyboard, args.interval, key)
                if key == "q":
                    return


async def _next_key(keyboard: Keyboard, interval_s: float, key: str) -> str:
    """The order to show next: that of the key that was pressed, or the same after the interval."""
    pressed = await keyboard.pressed(interval_s)
    return pressed if pressed == "q" or pressed in _ORDERS else key


def _draw(lines: list[str]) -> None:
    body = "\n".join(f"{line}{CLEAR_LINE}" for line in lines)
    print(f"{SHOW_FROM_TOP}{body}{CLEAR_REST}", end="", flush=True)


def screen(status: Status, key: str, num_columns: int, num_lines: int) -> list[str]:
    """The lines of the screen: at most `num_lines`, cut to `num_columns` characters. 0 columns mean
    that there is no terminal, and so no keys to press and nothing to cut.

    Args:
        key: of the order of adapters.
    """
    head = [*_summary(status), "", *_workers(status.workers, max(2, num_lines // 3))]
    if status.recent is None:
        tail = ["", "Use the first admin key to see rates, errors and the adapters in use."]
    else:
        space = max(2, num_lines - len(head) - 3)
        tail = ["", *_models(status.recent, key, space), *(["", _KEYS] if num_columns else [])]
    lines = [*head, *tail][:num_lines]
    return [line[:num_columns] for line in lines] if num_columns else lines


def _summary(status: Status) -> list[str]:
    ready = "ready" if status.ready else f"NOT READY: {status.not_ready_reason}"
    bases = ", ".join(status.base_ids) or "no base"
    registry = (
        "" if status.registry_connected else "   REGISTRY UNREACHABLE, the last snapshot is in use"
    )
    lines = [
        f"{ready}   {bases}   {counted(status.num_adapters, 'adapter')}{registry}",
        f"requests  {status.running_requests} running, {status.queued_requests} queued",
    ]
    return lines if status.recent is None else [*lines, *_rates(status.recent)]


def _rates(recent: RecentLoad) -> list[str]:
    window_s = max(recent.window_s, 1.0)
    failures = sorted(recent.failures.items(), key=lambda failure: -failure[1])
    num_failed = sum(recent.failures.values())
    reasons = ": " + ", ".join(f"{name} {number}" for name, number in failures[:5])
    return [
        f"rates     {recent.requests / window_s:.1f} requests/s, "
        f"{recent.generated_tokens / window_s:.1f} generated tokens/s, "
        f"{recent.prompt_tokens / window_s:.1f} prompt tokens/s over {window_s:.0f} s",
        f"latency   first token p50 {_time(recent.first_token_p50_s)}, "
        f"p95 {_time(recent.first_token_p95_s)}; whole request p50 {_time(recent.duration_p50_s)}, "
        f"p95 {_time(recent.duration_p95_s)}",
        f"errors    {num_failed}" + (reasons if failures else ""),
    ]


def _workers(workers: tuple[WorkerStatus, ...], num_lines: int) -> list[str]:
    """The busiest workers, those that are unreachable first."""
    order = sorted(workers, key=lambda w: (w.connected and w.ready, -w.load.running_requests))
    shown = order if len(order) < num_lines else order[: num_lines - 2]
    rows = [
        (
            worker.worker_id or worker.address,
            state_of(worker),
            str(worker.load.running_requests),
            str(worker.load.waiting_requests),
            _share(worker.load.total_blocks - worker.load.free_blocks, worker.load.total_blocks),
            _share(worker.load.idle_blocks, worker.load.total_blocks),
            str(worker.num_adapters_on_device),
            _time(worker.load.step_s),
        )
        for worker in shown
    ]
    header = (
        "WORKER",
        "STATE",
        "RUNNING",
        "WAITING",
        "MEMORY IN USE",
        "CACHED",
        "ON DEVICE",
        "STEP",
    )
    return [*table_lines(header, rows), *_hidden(len(order) - len(shown), "more workers")]


def _models(recent: RecentLoad, key: str, num_lines: int) -> list[str]:
    window_s = max(recent.window_s, 1.0)
    name, order = _ORDERS[key]
    models = sorted(recent.models, key=order)
    shown = models if len(models) < num_lines else models[: max(0, num_lines - 2)]
    rows = [
        (
            model.model,
            f"{model.requests / window_s:.2f}",
            f"{model.generated_tokens / window_s:.1f}",
            str(model.errors),
        )
        for model in shown
    ]
    header = (f"ADAPTER (by {name})", "REQUESTS/S", "TOKENS/S", "ERRORS")
    return [*table_lines(header, rows), *_hidden(len(models) - len(shown), "more")]


def _hidden(count: int, what: str) -> list[str]:
    return [f"... and {count} {what}"] if count else []


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f}%" if whole else "-"


def _time(seconds_: float) -> str:
    if not seconds_:
        return "-"
    return f"{seconds_ * 1000:.1f} ms" if seconds_ < 1 else f"{seconds_:.2f} s"
