"""The plugin of GLM-OCR: the entry point that the registry loads.

It registers no model, because the port does not exist; the distribution keeps the name, the layout and the hook in place.
"""

from __future__ import annotations

from collections.abc import Iterable

from kaminari_core.hookspecs import hookimpl
from kaminari_core.specs import ModelSpec


@hookimpl
def kaminari_models() -> Iterable[ModelSpec]:
    """No model yet."""
    return ()
