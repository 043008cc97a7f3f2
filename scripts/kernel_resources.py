"""Print registers, spills and shared memory of every Triton kernel and target; needs no GPU.

python scripts/kernel_resources.py [--target 90] [--only lora]
"""

from __future__ import annotations

import argparse

from loraplex_services.worker.ops.compiled import CAPABILITIES, resources, variants


def main() -> None:
    """One line for each kernel and target."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=int, action="append", help="compute capability, as 90")
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    args = parser.parse_args()
    print(f"{'kernel':<36}{'target':>8}{'registers':>11}{'spill B':>9}{'shared B':>10}")
    for variant in variants():
        if args.only not in variant.name:
            continue
        for target in args.target or CAPABILITIES:
            used = resources(variant.compile(target))
            print(
                f"{variant.name:<36}{f'sm_{target}':>8}{used.num_registers:>11}"
                f"{used.spill_bytes:>9}{used.shared_bytes:>10}",
                flush=True,
            )


if __name__ == "__main__":
    main()
