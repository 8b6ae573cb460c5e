"""Where kaminari keeps what was compiled, so that the second start does not compile again.

One directory per user, `KAMINARI_CACHE_DIR` or `kaminari` in the user's cache directory; nothing in it is needed, and it may be
deleted at any time. The seam is the environment: torch's compiler reads its directory there, and writes it there itself.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path

logger = logging.getLogger(__name__)

VARIABLE = "KAMINARI_CACHE_DIR"
INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"


def cache_directory(environment: Mapping[str, str] = os.environ) -> Path:
    """The directory of this user: `KAMINARI_CACHE_DIR`, `$XDG_CACHE_HOME/kaminari` or `~/.cache/kaminari`. It need not exist."""
    if given := environment.get(VARIABLE):
        return Path(given).expanduser()
    return Path(environment.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kaminari"


def graph_directory(root: Path) -> Path:
    """Where in a cache directory this version of torch, on this interpreter and processor, keeps compiled graphs.

    Within it the compiler finds a graph by its operations, shapes and settings. The name has what it does not look at: the
    instruction set that the machine code is for, since a home directory may be shared by several machines.
    """
    import torch

    processor = torch.backends.cpu.get_cpu_capability().replace(" ", "-").lower()
    return root / "graphs" / f"torch-{torch.__version__}-{sys.implementation.cache_tag}-{processor}"


def keep_graphs() -> Path:
    """Let torch's compiler keep its graphs in `graph_directory`, unless its own variable names a place; returns the place.

    Where the directory cannot be made, the compiler's default serves and a warning says so. Only the user may read it: what lies
    there is loaded as code.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    given = os.environ.get(INDUCTOR)
    # The compiler writes its default there by itself, as soon as some library looks at it.
    if given and given != default_cache_dir():
        return Path(given)
    directory = graph_directory(cache_directory())
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        logger.warning("compiled graphs cannot be kept in %s (%s); set %s", directory, error.strerror, VARIABLE)
        return Path(default_cache_dir())
    os.environ[INDUCTOR] = str(directory)
    return directory
