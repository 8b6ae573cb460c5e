"""From a model's spec and a checkpoint to the case that is planned for."""

from __future__ import annotations

import importlib.resources
from pathlib import Path

from kaminari_core.config import EngineConfig
from kaminari_core.errors import PluginError
from kaminari_core.fit.facts import Footprint
from kaminari_core.fit.plan import ITEM, Case
from kaminari_core.fit.weights import stored_bytes, weigh
from kaminari_core.headers import read_headers
from kaminari_core.placement import dtype_name
from kaminari_core.specs import ModelSpec

GIB = 2**30


def published(spec: ModelSpec, size: str) -> Path:
    """The directory with the configuration of a published size that a plugin brings."""
    package, _, folder = spec.shapes[size].partition(":")
    return Path(str(importlib.resources.files(package) / folder))


def make_case(spec: ModelSpec, folder: Path, config: EngineConfig, device: str, *, head: str = "none") -> Case:
    """What is planned for on a kind of device (`cuda`, `cpu`). `head` is a quantizer for the output head, in a plain directory.

    Raises PluginError, with what is known all the same, for a model whose package has no footprint, and CheckpointError.
    """
    if spec.footprint is None:
        raise PluginError(_unknown(spec, folder))
    footprint: Footprint = spec.load_footprint()(folder)
    dtype = dtype_name(config.dtype, device, stored_bytes(folder, footprint))
    weights = weigh(
        folder,
        footprint,
        item=ITEM[dtype],
        device=device,
        quantizer=config.quantizer,
        draft=config.draft == "mtp",
        head=head,
    )
    return Case(footprint, weights, device, dtype, folder)


def _unknown(spec: ModelSpec, folder: Path) -> str:
    stored = sum(header.bytes for header in read_headers(folder).values())
    return (
        f"the memory of the model {spec.name!r} cannot be planned: its plugin names no footprint. Known is that its weight files "
        f"have {stored / GIB:.2f} GiB. Not known is what a cache position, its vision tower and its longest prompt take. Its "
        "plugin can be told to say so (docs/plugins.md)"
    )
