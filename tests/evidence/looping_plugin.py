"""A plugin with a model that says its own prompt, and a task whose prompt goes round in circles."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from kaminari_core.config import EngineConfig
from kaminari_core.hookspecs import hookimpl
from kaminari_core.specs import ModelSpec
from kaminari_core.testing import EchoModel

LOOP = "Prices: " + "a1 " * 100


def load(checkpoint: Path, config: EngineConfig, device: torch.device, progress: Any) -> EchoModel:
    return EchoModel(config)


@hookimpl
def kaminari_models() -> Iterable[ModelSpec]:
    target = "tests.evidence.looping_plugin:load"
    return [
        ModelSpec(
            name="looping", target=target, model_types=("looping",), tasks={"ocr": LOOP, "caption": f"Many {LOOP}"}
        )
    ]
