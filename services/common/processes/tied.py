"""Ends a child process together with the process that started it, however that ends.

The kernel keeps a death signal across exec, so the child itself needs to know nothing. Linux only.
"""

from __future__ import annotations

import os
import sys

_TIE = """
import ctypes, os, sys
PR_SET_PDEATHSIG, SIGKILL = 1, 9
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


def tied_to_parent(*command: str) -> list[str]:
    """A command that ends with this process and becomes `command`.

    A separate program does it: running Python between fork and exec is not safe next to the threads
    of gRPC.

    Args:
        command: the path of a program, and its arguments.
    """
    if sys.platform != "linux":
        return [*command]
    return [sys.executable, "-I", "-S", "-c", _TIE, str(os.getpid()), *command]
