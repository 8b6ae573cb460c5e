"""What there is to compute with on this machine, as plain values for `kaminari doctor`.

The answers come from where the engine gets them, `library` and torch itself. Nothing is compiled
unless that is asked for.
"""

from __future__ import annotations

import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from kaminari_core import __version__
from kaminari_core.cache_directory import cache_directory, graph_directory
from kaminari_core.kernels import library
from kaminari_core.protocols import Progress

_FEATURES = (
    "avx2",
    "fma",
    "avx512f",
    "avx512bw",
    "avx512vl",
    "avx512dq",
    "avx512_vnni",
    "avx512_bf16",
    "avx_vnni",
    "amx_int8",
)
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def diagnose(compile: bool, progress: Progress) -> dict[str, dict[str, Any]]:
    """Sections of named facts. `compile` compiles the kernels, with `progress`, where they are not in the cache."""
    kernels = _kernels(compile, progress)
    return {
        "versions": _versions(),
        "processor": _processor(),
        "card": _card(),
        "compiler": _compiler(),
        "kernels": kernels,
        "caches": {"directory": str(cache_directory()), "graphs": str(graph_directory(cache_directory()))},
        "what serves": _serving(kernels["state"]),
    }


def _versions() -> dict[str, Any]:
    found: dict[str, Any] = {"kaminari": __version__, "python": sys.version.split()[0], "torch": torch.__version__}
    for name in ("transformers", "safetensors", "numpy", "pillow"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def _processor() -> dict[str, Any]:
    facts = _cpuinfo()
    flags = set(facts.get("flags", "").split())
    huge = _HUGE_PAGES.read_text().strip() if _HUGE_PAGES.is_file() else None
    return {
        "name": facts.get("model name", platform.processor() or platform.machine()),
        "machine": f"{platform.machine()} {platform.system()}",
        "threads": torch.get_num_threads(),
        "instructions": [name for name in _FEATURES if name in flags],
        "torch_uses": torch.backends.cpu.get_cpu_capability(),
        "huge_pages": huge,
    }


def _cpuinfo() -> dict[str, str]:
    """The first processor of /proc/cpuinfo; empty elsewhere."""
    file = Path("/proc/cpuinfo")
    if not file.is_file():
        return {}
    first = file.read_text().partition("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _card() -> dict[str, Any]:
    if torch.version.cuda is None:
        return {"cuda": None, "reason": f"this PyTorch ({torch.__version__}) is built without CUDA"}
    if not torch.cuda.is_available():
        return {"cuda": torch.version.cuda, "reason": "PyTorch sees no card: check the driver (nvidia-smi)"}
    cards = []
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        cards.append(
            f"cuda:{index} {card.name}, {card.total_memory / 2**30:.1f} GiB, compute {card.major}.{card.minor}"
        )
    return {"cuda": torch.version.cuda, "cards": cards}


def _compiler() -> dict[str, Any]:
    try:
        found = library.find_compiler()
    except library.BuildError as error:
        return {"command": None, "reason": str(error)}
    return {"command": found.command, "version": found.version}


def _kernels(compile: bool, progress: Progress) -> dict[str, Any]:
    """`state` is loaded, not compiled, or missing; `reason` says why where they are not loaded."""
    if reason := library.unsupported():
        return {"state": "missing", "reason": reason}
    try:
        path = library.library_path(library.find_compiler())
        if not compile and not path.exists():
            reason = "they are compiled when an engine opens on the CPU; --compile does it now"
            return {"state": "not compiled", "reason": reason, "library": str(path)}
        library.ensure(progress)
        library.load(progress)
    except library.BuildError as error:
        return {"state": "missing", "reason": str(error)}
    return {"state": "loaded", "instructions": library.instructions(), "library": str(path)}


def _serving(state: str) -> dict[str, Any]:
    """What each kind of work gets with `--kernels auto`."""
    own = "own kernel" if state == "loaded" else "own kernel, once it is compiled"
    if state == "missing":
        quantized = {"4-bit weights": "torch's packed product", "8-bit weights": "torch, made full for every product"}
        few = {"decode attention": "torch", "few rows, bfloat16 weights": "torch"}
    else:
        quantized = {"4-bit weights": own, "8-bit weights": own}
        few = {"decode attention": own, "few rows, bfloat16 weights": own}
    return {
        **few,
        **quantized,
        "everything else": "torch",
        "on a card": "torch, with its packed product for 4-bit weights",
    }
