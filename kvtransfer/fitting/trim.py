"""Memory that was freed, and that the C library keeps."""

import ctypes
import sys
from collections.abc import Callable
from functools import cache


def give_back() -> None:
    """Let the system have freed memory back.

    glibc keeps what was freed between blocks in use. Two models' forwards leave some there with
    every batch, which comes to hundreds of megabytes before it levels off. Elsewhere than under
    glibc this does nothing.
    """
    if trim := _trim():
        trim(0)


@cache
def _trim() -> Callable[[int], int] | None:
    if sys.platform != "linux":
        return None
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
