"""`registry split --shadow`: compares a candidate on live requests, then moves the tag or not."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from loraplex.cli.clients import gateway_client, registry_client
from loraplex.cli.output import show
from loraplex.cli.parsing import count, number

if TYPE_CHECKING:
    from loraplex.api.registry import AdapterVersion
    from loraplex.client.comparing import Comparison
    from loraplex.client.inference_client import InferenceClient
    from loraplex.client.paired_test import PairedTest
    from loraplex.client.registry_client import RegistryClient

DEFAULT_MARGIN = 0.01
DEFAULT_MAX_PAIRS = 2000
MAX_FAILED = 20
"""Number of consecutive requests that may fail for lack of memory or time. They are left out."""
SHOWN_EVERY = 25
"""Pairs between two lines of progress."""
SCORER_GRACE_S = 5.0
"""How long the scorer may take to end."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `registry split` that concern a comparison."""
    group = parser.add_argument_group("comparison")
    group.add_argument(
        "--shadow",
        action="store_true",
        help="let the tag stay at the first version, run the second on copies of its share of the "
        "requests, and move the tag to the second unless it is worse by more than --margin",
    )
    group.add_argument(
        "--scorer",
        metavar="COMMAND",
        help="command that reads a line of JSON for each answer, with prompt, answer and version, "
        "and writes its score from 0 to 1 (default: compare the log-probability per token of the "
        "answers that were served)",
    )
    group.add_argument(
        "--margin",
        type=_margin,
        metavar="SCORE",
        help="how much worse the second version may be on average (default: 0.01)",
    )
    group.add_argument(
        "--max-pairs",
        type=count,
        metavar="N",
        help="end undecided, with exit code 1, after this many requests (default: 2000)",
    )
    group.add_argument(
        "--gateway",
        metavar="HOST:PORT",
        help="gateway whose requests are copied (default: LORAPLEX_GATEWAY_ADDRESS)",
    )


def _margin(text: str) -> float:
    return number(text, lambda value: 0 < value < 1, "a number above 0 and below 1, such as 0.01")


def check_unused(args: argparse.Namespace) -> None:
    """Raises InvalidRequest if a flag of the comparison is given without `--shadow`."""
    from loraplex.errors import InvalidRequest

    for name in ("scorer", "margin", "max_pairs", "gateway"):
        if getattr(args, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise InvalidRequest.field(flag, getattr(args, name), "is used only with --shadow")


async def compare(args: argparse.Namespace) -> None:
    """Compare until the evidence suffices; then move the tag, or record why it stays.

    Raises:
        InvalidAdapter: the candidate is worse.
        Conflict: the tag moved in the meantime.
        Undecided: undecided after `--max-pairs`.
    """
    from loraplex.client.paired_test import Outcome, PairedTest
    from loraplex.errors import InvalidAdapter, Undecided, Violation

    test = PairedTest(DEFAULT_MARGIN if args.margin is None else args.margin)
    max_pairs = DEFAULT_MAX_PAIRS if args.max_pairs is None else args.max_pairs
    async with registry_client(args) as registry:
        served, candidate = await _versions(args, registry)
        async with gateway_client(args) as gateway:
            await _run(args, test, max_pairs, gateway, served, candidate)
        is_accepted = test.outcome is Outcome.ACCEPTED
        measure = "log-probability per token" if args.scorer is None else "score"
        found = (
            f"{candidate.ref} is {test.outcome}, compared with v{served.version}: its {measure} "
            f"minus that of v{served.version} is {test.mean:+.4f} on average over {test.num_pairs} "
            f"requests (standard error {test.standard_error:.4f}), and must be above "
            f"{-test.margin:g}"
        )
        tag = await registry.set_tag(
            args.name,
            args.tag,
            {(candidate if is_accepted else served).version: 1},
            expect=served.digest,
            reason=f"shadow: {found}",
        )
    if test.outcome is Outcome.REJECTED:
        raise InvalidAdapter.of([Violation.of("mean", f"{test.mean:+.4f}", found)])
    if not is_accepted:
        raise Undecided(f"the tag stays: {found}")
    value = {
        "name": tag.name,
        "version": candidate.version,
        "digest": candidate.digest,
        "tag": tag.tag,
        "decision": test.outcome.value,
        "mean": test.mean,
        "standard_error": test.standard_error,
        "pairs": test.num_pairs,
    }
    text = f"{tag.tenant}/{tag.name}:{tag.tag} -> v{candidate.version} ({found})"
    show(value, text, as_json=args.json)


async def _versions(
    args: argparse.Namespace, registry: RegistryClient
) -> tuple[AdapterVersion, AdapterVersion]:
    """The target of the tag, and the candidate. Raises: InvalidRequest, Conflict, NotFound."""
    from loraplex.errors import Conflict, InvalidRequest
    from loraplex.refs import parse_name

    parse_name(args.name)
    if len(args.targets) != 2:
        raise InvalidRequest("vN=WEIGHT: --shadow takes the served version and one other")
    if args.when_loaded or args.expect:
        raise InvalidRequest("--shadow: leave out --when-loaded and --expect")
    if args.max_pairs == 0:
        raise InvalidRequest.field("--max-pairs", 0, "must be at least 1")
    served, candidate = [
        (await registry.get(f"{args.name}:v{version}")).version for version, _ in args.targets
    ]
    tagged = (await registry.get(f"{args.name}:{args.tag}")).tags
    targets = next(tag.targets for tag in tagged if tag.tag == args.tag)
    if [target.version for target in targets] != [served.version]:
        raise Conflict(
            f"{args.name}:{args.tag} must point at v{served.version} alone, which comes first: "
            "move the tag, or name another version first"
        )
    return served, candidate


async def _run(
    args: argparse.Namespace,
    test: PairedTest,
    max_pairs: int,
    gateway: InferenceClient,
    served: AdapterVersion,
    candidate: AdapterVersion,
) -> None:
    """Add pairs until the test is decided. Mutates: test."""
    from loraplex.client.paired_test import Outcome
    from loraplex.errors import Conflict, DeadlineExceeded, ResourceExhausted, Unavailable

    num_failed = 0
    weights = [weight for _, weight in args.targets]
    mirrored = gateway.mirrored(f"{args.name}:{args.tag}", weights[1] / sum(weights))
    async with (
        contextlib.aclosing(mirrored) as requests,
        _comparison(args, gateway, served.ref, candidate.ref) as comparison,
    ):
        async for request in requests:
            if request.digest != served.digest:
                raise Conflict(f"{args.name}:{args.tag} was moved by someone else; start again")
            try:
                test.add(await comparison.difference(request))
            except (DeadlineExceeded, ResourceExhausted, Unavailable):
                num_failed += 1
                if num_failed > MAX_FAILED:
                    raise
                continue
            num_failed = 0
            if test.num_pairs % SHOWN_EVERY == 0 and sys.stderr.isatty():
                shown = f"{test.num_pairs} requests, mean difference {test.mean:+.4f}"
                print(f"{shown} (standard error {test.standard_error:.4f})", file=sys.stderr)
            is_decided = test.outcome is not Outcome.UNDECIDED
            if is_decided or test.num_pairs >= max_pairs:
                return


@contextlib.asynccontextmanager
async def _comparison(
    args: argparse.Namespace, gateway: InferenceClient, served: str, candidate: str
) -> AsyncIterator[Comparison]:
    import asyncio
    import os
    import shlex
    import signal

    from loraplex.client.comparing import LogprobComparison, ScorerComparison
    from loraplex.errors import InvalidRequest

    if args.scorer is None:
        yield LogprobComparison(gateway, served, candidate)
        return
    try:
        words = shlex.split(args.scorer)
    except ValueError as error:
        raise InvalidRequest.field("--scorer", args.scorer, f"{error}") from None
    if not words:
        raise InvalidRequest.field("--scorer", args.scorer, "must be a command")
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *words, stdin=pipe, stdout=pipe, start_new_session=True
    )
    try:
        yield ScorerComparison(gateway, candidate, process)
    finally:
        # The end of its input tells the command to finish. What it started goes with it.
        assert process.stdin is not None, "piped"
        process.stdin.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), SCORER_GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
