"""Makes the child end with the supervisor, then executes it.

The kernel keeps the death signal across exec, so the child itself needs to know nothing.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(parent_pid: int, module: str, *arguments: str) -> None:
    """Become `python -m module ARGUMENTS`."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit("the supervisor has ended")
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
