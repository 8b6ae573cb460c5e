"""What plugins hand over: frozen facts plus a lazily imported target.

A spec is cheap to make and to list: `kaminari models` prints facts without importing torch. `target` is `"module:attribute"`
and is imported by `load()` only when the thing is used.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from kaminari_core.errors import PluginError


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """A name, one line about it, and where its factory lives."""

    name: str
    target: str
    summary: str = ""

    def load(self) -> Any:
        """Import and return the target. Raises PluginError naming the spec when that fails."""
        return self._import(self.target)

    def _import(self, target: str) -> Any:
        module, _, attribute = target.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise PluginError(f"{self.name!r} names the target {target!r}, which cannot be loaded: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec(Spec):
    """A model architecture.

    The target is called as `target(checkpoint: pathlib.Path, config: EngineConfig, device: torch.device, progress)` and
    returns a `protocols.Model`. `model_types` are the `model_type` values of config.json that it serves; `bundled` maps short
    checkpoint names such as `tiny` to `"package:folder"`; `tasks` maps task names to the prompt text that asks for them, where
    `{template}` is the place of a JSON template that the user gives (see `tasks.fill`); `reference` is the target of a callable
    `(checkpoint, device, dtype) -> protocols.Reference`, the stock implementation that tests and benchmarks compare against.
    `footprint` is the target of a callable `(checkpoint) -> fit.Footprint` that imports nothing heavy, for the memory plan, and
    `shapes` maps published sizes such as `2b` to `"package:folder"` with their config.json, so that it can be asked about them.
    """

    model_types: tuple[str, ...] = ()
    bundled: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    tasks: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    reference: str | None = None
    footprint: str | None = None
    shapes: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def load_footprint(self) -> Any:
        """Import and return the callable that reads a checkpoint's sizes. Raises PluginError when there is none."""
        if self.footprint is None:
            raise PluginError(f"the model {self.name!r} names no footprint, so its memory cannot be planned")
        return self._import(self.footprint)

    def load_reference(self) -> Any:
        """Import and return the callable that loads the stock implementation. Raises PluginError when there is none."""
        if self.reference is None:
            raise PluginError(f"the model {self.name!r} names no stock implementation to compare with")
        return self._import(self.reference)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSpec(Spec):
    """A KV cache.

    The target is called as `target(shape, slots, max_length, device, dtype, width=width)`, where `width` is the most tokens of
    one row in a step, and returns a `protocols.Cache`.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSpec(Spec):
    """An admission policy. The target is called as `target(config)` and returns a `protocols.Scheduler`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizerSpec(Spec):
    """A weight quantizer. The target is called as `target()` and returns a `protocols.Quantizer`."""
