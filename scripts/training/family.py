"""The architectures that can be trained: how each is started, loaded and saved, and what it is trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch._dynamo

from training.forward import Reader
from training.plan import Stage


@dataclass(frozen=True)
class Family:
    """One architecture: a reader with initial weights or those of a folder, a folder from a reader, and the plans.

    `drafts` says that there is a draft head, which is measured through the engine.
    """

    start: Callable[[], Any]
    load: Callable[[Path], Any]
    save: Callable[[Any, Path], None]
    plans: Mapping[str, Sequence[Stage]]
    drafts: bool = False


def qwen3vl() -> Family:
    """Qwen3-VL."""
    from training.architecture import build
    from training.folder import load, save
    from training.plan import PLANS

    return Family(
        start=lambda: Reader(build()),
        load=lambda folder: Reader(load(folder)),
        save=lambda reader, folder: save(reader.model, folder),
        plans=PLANS,
    )


def glmocr() -> Family:
    """GLM-OCR with its draft head."""
    from training.glmocr.architecture import build
    from training.glmocr.folder import load, save
    from training.glmocr.forward import GlmReader
    from training.glmocr.plan import PLANS

    # A compiled function is made anew for every canvas size.
    torch._dynamo.config.recompile_limit = 64
    return Family(start=lambda: GlmReader(build()), load=load, save=save, plans=PLANS, drafts=True)


FAMILIES: Mapping[str, Callable[[], Family]] = {"qwen3vl": qwen3vl, "glmocr": glmocr}
