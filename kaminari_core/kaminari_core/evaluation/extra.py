"""The libraries of the extra `kaminari-core[eval]`, imported when a metric is computed and asked for by name when missing."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from kaminari_core.errors import UsageError

MODULES = ("apted", "jiwer", "rapidfuzz")


def need(module: str) -> Any:
    """Import a module of the extra. Raises UsageError with the command that installs it."""
    try:
        return import_module(module)
    except ImportError:
        name = module.partition(".")[0]
        raise UsageError(f"measuring quality needs {name}: pip install 'kaminari-core[eval]'") from None


def check_available() -> None:
    """Raise UsageError when a library of the extra is missing."""
    for module in MODULES:
        need(module)
