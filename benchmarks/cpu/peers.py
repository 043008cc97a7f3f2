"""The engine in process, compared with other engines on the same requests.

    benchmarks/cpu/install_peers.sh PEERS                   # vLLM's CPU build, llama.cpp
    python -m benchmarks run cpu.peers --work-dir DIR --peers PEERS [--only llama.cpp] [--cases 8x0]
        [--file Q4_K_M] [--cpu-isa avx2 --peer-dtype float32]

A case is requests x distinct adapters; 0 means the base alone. Only correct answers have a speed: a
peer's first tokens must equal ours in three of four requests (near ties differ in bfloat16).
llama.cpp computes in bfloat16 only. Where `cpu.table` forces a level below the machine's
best one, vLLM keeps to it, too; llama.cpp is built for the machine. Rows go to
`results/<machine>/cpu_peers.json` (`--name`) and replace earlier ones of the same peer, case and
number of new tokens. With `--file`, both sides serve the same GGUF file, which llama.cpp's program
quantises; llama.cpp then rounds activations to 8 bits, and we do not.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.cpu.peer_wire import Batch
from benchmarks.cpu.sides import OurEngine
from benchmarks.cpu_model import (
    SHAPES,
    dtype_of,
    engine_options,
    make_adapter,
    make_base,
    make_prompts,
    peer_dtype_of,
)
from benchmarks.machine import read_results, write_results
from loraplex_services.worker.model.formats.gguf_folder import write_folder

ARENA_BYTES = 2_000_000_000
PEERS = {"vllm": "peer_vllm.py", "llama.cpp": "peer_llamacpp.py"}
"""Scripts by the folder of their environment."""
RIGHT_SHARE = 0.75


class Peer:
    """A peer in a process of its own."""

    def __init__(
        self, name: str, root: Path, base: Path, rows: int, adapters: list[Path], dtype: str
    ) -> None:
        self._process = subprocess.Popen(
            [*command_of(name, root), str(base), str(rows), *map(str, adapters)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PEER_DTYPE": dtype},
        )
        self._answer()

    def run(self, prompts: list[list[int]], num_adapters: int, num_tokens: int) -> dict[str, Any]:
        """`wall_s` and `outputs`; adapters go round."""
        assert self._process.stdin is not None
        adapters = [i % num_adapters if num_adapters else None for i in range(len(prompts))]
        line = Batch(prompts, adapters, num_tokens).to_line()
        print(line, file=self._process.stdin, flush=True)
        answer: dict[str, Any] = self._answer()
        return answer

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the peer ended with status {self._process.wait()}; see above")
        return json.loads(line)


def main() -> None:
    """Measure, print, write."""
    args = parse_args()
    shape = SHAPES[args.model]
    base = make_base(shape, args.work_dir)
    cases = [tuple(map(int, case.split("x"))) for case in args.cases.split(",")]
    folders = [make_adapter(shape, args.work_dir, i) for i in range(max(n for _, n in cases))]
    names = args.only.split(",") if args.only else list(PEERS)
    served = base
    if args.file:
        names = ["llama.cpp"]
        base, served = quantised(base, args.file, args.peers)
    ours = OurEngine(served, args.dtype, args.cpu_isa, ARENA_BYTES)
    ours.touch()  # as vLLM does, which writes zeros to its cache when it starts
    ours.load(folders)
    for name in names:
        for count, num_adapters in cases:
            adapters = folders[:num_adapters]
            peer = Peer(name, args.peers, base, count, adapters, args.peer_dtype)
            row = compare(ours, peer, count, num_adapters, args)
            peer.close()
            label = f"{name} {args.file}" if args.file else name
            keep({"peer": label, "case": f"{count}x{num_adapters}", **row}, args)


def command_of(name: str, root: Path) -> list[str]:
    """The start of a peer's command line."""
    # Not resolved: a virtual environment is known by the path of its interpreter.
    python = root.absolute() / name / "bin" / "python"
    return [str(python), str(Path(__file__).with_name(PEERS[name]))]


def quantised(base: Path, file: str, root: Path) -> tuple[Path, Path]:
    """The base as a GGUF file, and the folder that a worker makes of it."""
    command = [*command_of("llama.cpp", root), "--quantise", file, str(base)]
    answer = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    path = Path(json.loads(answer.stdout))
    folder = path.with_suffix("")
    if not folder.exists():
        folder.mkdir()
        write_folder(path, folder)
    return path, folder


def compare(
    ours: OurEngine, peer: Peer, count: int, num_adapters: int, args: Namespace
) -> dict[str, Any]:
    """One row of results: whether the peer is right, and if so, both sides' seconds."""
    vocab_size = SHAPES[args.model].vocab_size
    warm = make_prompts(count, vocab_size, seed=-1)
    peer.run(warm, num_adapters, args.new_tokens)
    ours.run(warm, num_adapters, args.new_tokens)
    runs, as_ours, as_base = [], 0, 0
    cpu_ratios: list[float] = []
    for repetition in range(args.repetitions):
        prompts = make_prompts(count, vocab_size, seed=1000 * count + repetition)
        answer = peer.run(prompts, num_adapters, args.new_tokens)
        assert all(len(output) == args.new_tokens for output in answer["outputs"])
        own = ours.run(prompts, num_adapters, args.new_tokens)
        runs.append((own.wall_s, answer["wall_s"]))
        if "cpu_s" in answer:
            cpu_ratios.append(answer["cpu_s"] / own.cpu_s)
        as_ours += num_alike(answer["outputs"], ours.outputs)
        ours.run(prompts, 0, 1)
        as_base += num_alike(answer["outputs"], ours.outputs)
    num_answers = count * args.repetitions
    row: dict[str, Any] = {"new_tokens": args.new_tokens, "answers": num_answers}
    row["first_tokens_as_ours"] = as_ours
    if num_adapters:
        row["first_tokens_as_the_base"] = as_base
    row["is_right"] = as_ours >= RIGHT_SHARE * num_answers
    if row["is_right"]:
        speed = statistics.median(theirs / mine for mine, theirs in runs)
        medians = (statistics.median(side) for side in zip(*runs, strict=True))
        row["speed_over_peer"] = round(speed, 3)
        if cpu_ratios:
            row["cpu_of_peer_over_ours"] = round(statistics.median(cpu_ratios), 3)
        row["tokens_per_s"] = [round(count * args.new_tokens / s, 1) for s in medians]
        row["seconds"] = runs
    return row


def num_alike(outputs: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> int:
    """Requests with the same first token."""
    return sum(a[0] == b[0] for a, b in zip(outputs, others, strict=True))


def keep(row: dict[str, Any], args: Namespace) -> None:
    """Print the row and add it to the results file."""
    print(row, flush=True)
    keys = ("peer", "case", "new_tokens")
    try:
        known = read_results(args.name)
    except FileNotFoundError:
        known = {"table": [], "model": args.model}
    if known["model"] != args.model:
        raise SystemExit(
            f"{args.name}.json is of the model {known['model']}: choose another --name"
        )
    others = [old for old in known["table"] if any(old[key] != row[key] for key in keys)]
    table = sorted([*others, row], key=lambda r: (r["peer"], r["case"], r["new_tokens"]))
    write_results(args.name, {"model": args.model, "table": table})


def parse_args() -> Namespace:
    """Options."""
    parser = engine_options(__doc__)
    parser.add_argument("--peers", type=Path, required=True, help="where install_peers.sh put them")
    parser.add_argument("--only", help=f"of {', '.join(PEERS)}")
    parser.add_argument("--file", help="a type of GGUF files, such as Q8_0 or Q4_K_M")
    parser.add_argument("--cases", default="8x0,32x0,8x8,32x32", help="requests x adapters")
    parser.add_argument("--cpu-isa", default="auto")
    parser.add_argument("--dtype", default=dtype_of(), help="of the engine")
    parser.add_argument("--peer-dtype", default=peer_dtype_of(), help="of vLLM")
    parser.add_argument("--name", default="cpu_peers", help="of the results file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
