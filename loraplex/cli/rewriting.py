"""`registry merge` and `registry convert`: make adapters from adapters, offline."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from loraplex.cli.local_base import base_folder, geometry_of, given_folder
from loraplex.cli.output import show
from loraplex.cli.parsing import Commands, Run, add_json, add_unused_server, count, number
from loraplex.cli.sources import require_numpy
from loraplex.errors import InvalidRequest
from loraplex.units import counted

if TYPE_CHECKING:
    from loraplex.adapter_format import Report

METHODS = ("linear", "cat", "ties", "dare_linear", "dare_ties")
DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def add(commands: Commands) -> None:
    _add_merge(commands)
    _add_convert(commands)


def _add_merge(commands: Commands) -> None:
    parser = commands.add(
        "merge",
        _needing_numpy(_merge),
        "Merge adapters of one base into a new adapter, or into the base, offline.",
        "registry merge ./sql=0.7 ./support=0.3 --out ./both --method ties\n"
        "  registry merge ./support --into-base --base ./llama-3-8b --out ./llama-3-8b-support",
        server="",
    )
    parser.add_argument(
        "adapters",
        nargs="+",
        type=_weighted,
        metavar="DIR[=WEIGHT]",
        help="adapter folder and its weight in the sum (default: 1)",
    )
    parser.add_argument(
        "--out", required=True, type=Path, metavar="DIR", help="new or empty folder for the result"
    )
    parser.add_argument(
        "--into-base",
        action="store_true",
        help="write a full checkpoint of --base to which the sum of the adapters is added exactly",
    )
    parser.add_argument(
        "--method",
        choices=METHODS,
        default="linear",
        help="combination type of PEFT's add_weighted_adapter; cat is the exact sum, and the "
        "ranks add up",
    )
    parser.add_argument(
        "--density",
        type=float,
        default=0.5,
        help="fraction of the values that ties and dare keep (default: 0.5)",
    )
    parser.add_argument(
        "--majority-sign",
        choices=("total", "frequency"),
        default="total",
        help="how ties elects a sign (default: total)",
    )
    parser.add_argument(
        "--seed", type=count, default=0, help="seed of the random choice of dare (default: 0)"
    )
    _add_common(parser)


def _add_convert(commands: Commands) -> None:
    parser = commands.add(
        "convert",
        _needing_numpy(_convert),
        "Convert an adapter folder between formats, offline.",
        "registry convert ./alpaca-lora ./alpaca --to safetensors\n"
        "  registry convert ./support ./support-trtllm --to trtllm",
        server="",
    )
    parser.add_argument(
        "dir", type=Path, metavar="DIR", help="adapter folder of PEFT or TensorRT-LLM"
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="new or empty folder")
    parser.add_argument(
        "--to",
        choices=("safetensors", "trtllm", "peft", "lora"),
        required=True,
        help="safetensors: from adapter_model.bin. trtllm: LoraWeights and LoraConfig as .npy "
        "files. peft: from those files, from an export of Tinker, or with --initial. lora: "
        "from another PEFT method, such as LoHa.",
    )
    parser.add_argument(
        "--rank",
        type=count,
        default=0,
        help="with --to lora: largest rank of a module (default: 256)",
    )
    parser.add_argument(
        "--initial",
        type=Path,
        metavar="DIR",
        help="adapter before training, to convert a PiSSA, OLoRA or CorDA adapter to a plain LoRA",
    )
    _add_common(parser)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base", default="", metavar="DIR|ID", help="base to check shapes against")
    parser.add_argument(
        "--dtype", choices=DTYPES, help="type of the result (default: that of the first adapter)"
    )
    add_unused_server(parser, "registry")
    add_json(parser)


def _weighted(text: str) -> tuple[Path, float]:
    """`DIR` or `DIR=WEIGHT`."""
    folder, equals, weight = text.rpartition("=")
    if not equals or Path(text).is_dir():
        return Path(text), 1.0
    return Path(folder), number(weight, math.isfinite, "DIR=WEIGHT with a finite number")


def _needing_numpy(run: Callable[[argparse.Namespace], None]) -> Run:
    def checked(args: argparse.Namespace) -> None:
        require_numpy()
        run(args)

    return checked


def _merge(args: argparse.Namespace) -> None:
    if args.into_base:
        _merge_into_base(args)
        return
    from loraplex.rewriting.merging import Recipe, merge

    recipe = Recipe(args.method, args.density, args.majority_sign, args.seed)
    report = merge(args.adapters, args.out, recipe, geometry_of(args.base), _dtype(args))
    adapters = counted(len(args.adapters), "adapter")
    _print(args, report, f"merged {adapters} ({args.method}) into {args.out}")


def _merge_into_base(args: argparse.Namespace) -> None:
    from loraplex.rewriting.into_base import merge_into_base

    base = given_folder(args.base)
    if base is None:
        raise InvalidRequest.field("--base", "", "is required: name the base to merge into")
    if args.method not in ("linear", "cat"):
        description = "makes an adapter; merge the adapters by it first, then the result into base"
        raise InvalidRequest.field("--method", args.method, description)
    merged = merge_into_base(args.adapters, base, args.out, _dtype(args))
    note = " (the head is a table of its own now)" if merged.is_untied else ""
    text = f"merged into {counted(merged.num_modules, 'module')} of the base{note}: {args.out}"
    show({"name": args.out.resolve().name, **asdict(merged)}, text, as_json=args.json)


def _convert(args: argparse.Namespace) -> None:
    if not args.dir.is_dir():
        raise InvalidRequest.field(
            "DIR", str(args.dir), "is not a folder; give an adapter's folder"
        )
    if args.rank and args.to != "lora":
        raise InvalidRequest.field("--rank", args.rank, "is used only with --to lora")
    if args.initial is not None and args.to != "peft":
        raise InvalidRequest.field("--initial", args.initial, "is used only with --to peft")
    if args.to == "safetensors":
        _from_pickle(args)
    elif args.to == "trtllm":
        _to_trtllm(args)
    elif args.to == "lora":
        _to_lora(args)
    else:
        _to_peft(args)


def _from_pickle(args: argparse.Namespace) -> None:
    from loraplex.rewriting.pickled import from_pickle

    report = from_pickle(args.dir, args.out, geometry_of(args.base), _dtype(args))
    _print(args, report, f"wrote an adapter of rank {report.max_rank} into {args.out}")


def _to_trtllm(args: argparse.Namespace) -> None:
    from loraplex.rewriting.tensors import open_adapter
    from loraplex.rewriting.trtllm import to_trtllm

    geometry = geometry_of(args.base)
    opened = open_adapter(args.dir, geometry)
    num_rows = to_trtllm(opened, args.out, _dtype(args) or "F16", geometry, given_folder(args.base))
    _print(args, opened.report, f"wrote {num_rows} rows for TensorRT-LLM into {args.out}")


def _to_lora(args: argparse.Namespace) -> None:
    from loraplex.rewriting.other_methods import MAX_RANK, named_base, to_lora

    base = base_folder(args.base or named_base(args.dir), os.environ)
    made = to_lora(args.dir, args.out, base, args.rank or MAX_RANK, _dtype(args))
    text = f"wrote a LoRA of rank {made.report.max_rank} into {args.out}: {made.method}, relative"
    _print(args, made.report, f"{text} error {made.relative_error:.1e}")


def _to_peft(args: argparse.Namespace) -> None:
    from loraplex.rewriting.merging import without_initial
    from loraplex.rewriting.respelling import from_tinker, is_tinker
    from loraplex.rewriting.trtllm import from_trtllm, is_trtllm

    geometry, dtype = geometry_of(args.base), _dtype(args)
    if args.initial is not None:
        report = without_initial(args.dir, args.initial, args.out, geometry, dtype)
    elif is_tinker(args.dir):
        report = from_tinker(args.dir, args.out, geometry)
    elif not is_trtllm(args.dir):
        description = "holds neither an export of Tinker nor files of TensorRT-LLM"
        raise InvalidRequest.field("DIR", str(args.dir), description)
    elif geometry is None:
        description = "is needed: the files do not say how wide the base's modules are"
        raise InvalidRequest.field("--base", "", description)
    else:
        base_id = "" if Path(args.base).is_dir() else args.base
        base = given_folder(args.base)
        report = from_trtllm(args.dir, args.out, geometry, base_id, dtype or "F16", base)
    _print(args, report, f"wrote a PEFT adapter of rank {report.max_rank} into {args.out}")


def _dtype(args: argparse.Namespace) -> str:
    """The safetensors name of a dtype; "" = not given."""
    return DTYPES[args.dtype] if args.dtype else ""


def _print(args: argparse.Namespace, report: Report, text: str) -> None:
    value = {
        "name": args.out.resolve().name,
        "max_rank": report.max_rank,
        "num_modules": report.num_modules,
    }
    show(value, text, as_json=args.json)
