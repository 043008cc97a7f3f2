"""`loraplex embed` and `loraplex score`."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from loraplex.cli.clients import gateway_client
from loraplex.cli.output import print_json, print_table, show, version_of
from loraplex.cli.parsing import Commands, count

if TYPE_CHECKING:
    from loraplex.client.vectors import Scores

SHOWN_VALUES = 6


def add(commands: Commands) -> None:
    parser = commands.add(
        "embed",
        _embed,
        "Print an embedding of each text; --json prints all of its values.",
        'loraplex embed search:prod "How do I reset my password?" --pooling mean --json',
    )
    parser.add_argument("ref", metavar="REF", help="adapter reference, or the id of a base")
    parser.add_argument("texts", metavar="TEXT", nargs="+")
    parser.add_argument(
        "--pooling",
        choices=("last", "mean"),
        default="",
        help="how token vectors are pooled (default: set by the adapter)",
    )
    parser.add_argument(
        "--normalize",
        action=argparse.BooleanOptionalAction,
        help="scale vectors to length 1 (default: set by the adapter)",
    )
    parser.add_argument(
        "--dimensions",
        type=count,
        metavar="N",
        default=0,
        help="keep only the first N values (default: all)",
    )

    parser = commands.add(
        "score",
        _score,
        "Print the scores of an adapter's classification head for each text.",
        'loraplex score toxicity:prod "have a nice day"',
    )
    parser.add_argument(
        "ref", metavar="REF", help="reference of an adapter with a classification head"
    )
    parser.add_argument("texts", metavar="TEXT", nargs="+")


async def _embed(args: argparse.Namespace) -> None:
    async with gateway_client(args) as client:
        found = await client.embed(
            args.ref,
            args.texts,
            pooling=args.pooling,
            normalize=args.normalize,
            dimensions=args.dimensions,
        )
    value = {**version_of(found.served_by), **dataclasses.asdict(found)}
    show(value, "\n".join(map(_spelled, found.vectors)), as_json=args.json)


def _spelled(vector: Sequence[float]) -> str:
    values = " ".join(f"{value:.4f}" for value in vector[:SHOWN_VALUES])
    return f"{len(vector)} values: {values}{' ...' if len(vector) > SHOWN_VALUES else ''}"


async def _score(args: argparse.Namespace) -> None:
    async with gateway_client(args) as client:
        scores = await client.score(args.ref, args.texts)
    if args.json:
        print_json({**version_of(scores.served_by), **dataclasses.asdict(scores)})
        return
    _print_scores(scores)


def _print_scores(scores: Scores) -> None:
    """Print a row for each text: the label, then each output, as a probability if it is one."""
    rows = [
        (score.label, *(f"{value:.4f}" for value in score.probabilities or score.logits))
        for score in scores
    ]
    print_table(("LABEL", *scores.labels), rows)
