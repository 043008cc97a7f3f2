"""Registry transfers compared with file copies, and index operations at two sizes.

    python -m benchmarks run registry.service [--rounds 5] [--adapters 100000] [--work-dir DIR]

Prints a table and writes results/<machine kind>/registry.json. Compared sides alternate within one
run, and ratios are medians over rounds, so a busy machine adds noise but no bias. The registry's
process, its embedded metadata server and the file store are real. With an S3 server
(scripts/s3_server.sh ceph python -m benchmarks run registry.service --only reindexing_bucket),
rebuilding from a bucket is measured, too.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

from benchmarks.machine import options_of, write_results
from benchmarks.registry.index import reindexing, reindexing_bucket, resolving
from benchmarks.registry.transfers import memory, transfers


async def _run(args: Namespace) -> None:
    """Run every part, or those that were named; print each when it ends, and write all at the
    end."""
    results: dict[str, Any] = {"load_average_before": round(os.getloadavg()[0], 1)}
    with tempfile.TemporaryDirectory(dir=args.work_dir) as folder:
        work = Path(folder)
        parts = {
            "transfers": lambda: transfers(work, args.rounds),
            "memory": lambda: memory(work, 1),
            "reindexing": lambda: reindexing(work, args.rounds, args.reindexed),
            "reindexing_bucket": lambda: reindexing_bucket(work, args.rounds),
            "resolving": lambda: resolving(work, args.rounds, args.adapters),
        }
        if "AWS_ENDPOINT_URL_S3" not in os.environ:
            del parts["reindexing_bucket"]
        for name in args.only or parts:
            results[name] = await parts[name]()
            for key, value in results[name].items():
                if key != "rounds":
                    print(f"{name:12} {key:32} {value}", flush=True)
        if not args.only:
            write_results("registry", results, args)


def main() -> None:
    """Entry point."""
    parser = options_of(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--adapters", type=int, default=100_000, help="in the large index")
    parser.add_argument("--reindexed", type=int, default=20_000, help="adapters in a rebuild")
    parser.add_argument("--work-dir", help="where files go meanwhile; a disk like the store's")
    parser.add_argument("--only", action="append", metavar="PART", help="and write no result")
    args = parser.parse_args()
    asyncio.run(_run(args))


if __name__ == "__main__":
    main()
