"""The broken ports of tests/fixtures as plugins, and the checkpoints that they are checked on."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from kaminari_core.registry import Registry, load_registry
from scripts.make_random_checkpoint import make_checkpoint

FIXTURE = Path(__file__).parent.parent / "fixtures" / "broken"
POINTS = {
    "core": "kaminari_core.builtin",
    "qwen3vl": "kaminari_qwen3vl.plugin",
    "glmocr": "kaminari_glmocr.plugin",
    "broken": "broken_ports.plugin",
}


@pytest.fixture(scope="session")
def broken_path() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FIXTURE)
        yield


@pytest.fixture(scope="session")
def registry(broken_path: None) -> Registry:
    """What this repository offers, and the broken ports."""
    return registry_of(**POINTS)


def registry_of(**points: str) -> Registry:
    found = load_registry(EntryPoint(name, target, "kaminari") for name, target in points.items())
    assert found.broken == ()
    return found


def only_quantizer(name: str) -> Registry:
    """One quantizer of the broken ports beside the models, and none of the core's."""
    found = registry_of(**POINTS, quantizers="broken_ports.quantizers")
    return dataclasses.replace(found, quantizers={name: found.quantizers[name]})


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random checkpoints by kind, and the description of one for the models that are made of the core's parts."""
    kinds = ("tiny", "tiny-untied", "tiny-moe", "tiny-glmocr")
    made = {kind: make_checkpoint(tmp_path_factory.mktemp("check") / kind, kind) for kind in kinds}
    made["core"] = tmp_path_factory.mktemp("check")
    (made["core"] / "config.json").write_text(json.dumps({"model_type": "core_only", "eos_token_id": 256}))
    return made
