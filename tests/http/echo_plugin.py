"""A plugin with models for tests of the command: `echo` says what it is told, `endless` never finishes loading."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from kaminari_core.config import EngineConfig
from kaminari_core.hookspecs import hookimpl
from kaminari_core.specs import ModelSpec
from kaminari_core.testing import EchoModel


class SlowEcho(EchoModel):
    """Takes 5 ms for a step, so that a test can do something in between."""

    def decode(self, step: Any, cache: Any, layer_call: Any) -> torch.Tensor:
        time.sleep(0.005)
        return super().decode(step, cache, layer_call)


def load(checkpoint: Path, config: EngineConfig, device: torch.device, progress: Any) -> EchoModel:
    return SlowEcho(config)


class Broken(EchoModel):
    """Fails at every step."""

    def decode(self, step: Any, cache: Any, layer_call: Any) -> torch.Tensor:
        raise RuntimeError("no kernel image")


def load_broken(checkpoint: Path, config: EngineConfig, device: torch.device, progress: Any) -> EchoModel:
    return Broken(config)


def load_endlessly(checkpoint: Path, config: EngineConfig, device: torch.device, progress: Any) -> EchoModel:
    while True:
        time.sleep(0.01)


@hookimpl
def kaminari_models() -> Iterable[ModelSpec]:
    return [
        ModelSpec(name="echo", target="tests.http.echo_plugin:load", model_types=("echo",)),
        ModelSpec(name="broken", target="tests.http.echo_plugin:load_broken", model_types=("broken",)),
        ModelSpec(name="endless", target="tests.http.echo_plugin:load_endlessly", model_types=("endless",)),
    ]
