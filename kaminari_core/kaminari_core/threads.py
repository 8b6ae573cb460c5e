"""Who may have helper threads: at any time one thread of the process, or all products become slow.

GNU's OpenMP library, which runs torch's parallel loops and those of the own kernels, gives every thread that starts such a loop
a pool of helpers, and keeps it. Helpers wait awake for the next loop as long as there are no more of them than processors. With
one pool too many they sleep, and waking them for each product costs more than a small product takes. So whoever is done computing
gives its helpers up: the thread that loaded, workers, and the engine's thread when it rests. Where another library serves, there
is nothing to give up and nothing happens.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch

_SOFT = 1
"""omp_pause_soft of the OpenMP 5.0 specification, section 3.2.43: what can be had again is freed."""


@functools.cache
def _pause() -> Callable[[int], int] | None:
    """The function of the library that torch has loaded; None where that is not GNU's."""
    for file in (Path(torch.__file__).parent / "lib").glob("libgomp*"):
        pause: Callable[[int], int] | None = getattr(ctypes.CDLL(str(file)), "omp_pause_resource_all", None)
        return pause
    return None


def release_helpers() -> None:
    """End the helper threads of the calling thread; its next parallel loop starts new ones, in a tenth of a millisecond."""
    if pause := _pause():
        pause(_SOFT)
