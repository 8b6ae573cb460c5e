"""From what `--model` and `--checkpoint` say to a model spec and a directory of files.

Only a hub id, which somebody must have typed, reaches a network; a name or a path never does. Nothing here imports torch.
"""

from __future__ import annotations

import importlib.resources
import json
import logging
import re
from pathlib import Path

from kaminari_core.errors import CheckpointError, UnknownNameError, UsageError
from kaminari_core.registry import Registry, unknown_name
from kaminari_core.specs import ModelSpec

logger = logging.getLogger(__name__)

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.safetensors")


def resolve(registry: Registry, model: str, checkpoint: str | None) -> tuple[ModelSpec, Path]:
    """The model spec and the checkpoint directory.

    `model` is a name that a plugin offers, or a directory whose config.json names a `model_type`; such a directory is the
    checkpoint as well unless another one is given. `checkpoint` is a name bundled with the model, a directory, or a hub id
    `owner/name`; None takes the first bundled one. Raises UsageError for what names nothing, CheckpointError for what is no
    checkpoint of that model.
    """
    folder = Path(model)
    if model not in registry.models and folder.is_dir():
        spec = registry.model_for_type(_model_type(folder))
        return spec, folder if checkpoint is None else resolve_checkpoint(spec, checkpoint)
    spec = registry.model(model)
    if checkpoint is None:
        if not spec.bundled:
            raise UsageError(f"the model {spec.name!r} brings no checkpoint; give one with --checkpoint")
        checkpoint = next(iter(spec.bundled))
        logger.warning("no --checkpoint was given: using %r, which comes with the plugin", checkpoint)
    return spec, resolve_checkpoint(spec, checkpoint)


def resolve_checkpoint(spec: ModelSpec, checkpoint: str) -> Path:
    """The directory that `checkpoint` means for a model. Raises UsageError or CheckpointError as `resolve` does.

    A bundled name wins over a directory of the same name, which can be written `./name`.
    """
    if checkpoint in spec.bundled:
        return _bundled(spec.bundled[checkpoint])
    folder = Path(checkpoint).expanduser()
    if folder.is_dir():
        served = _model_type(folder)
        if spec.model_types and served not in spec.model_types:
            raise CheckpointError(
                f"{folder} holds a checkpoint of model_type {served!r}, but {spec.name} serves {', '.join(spec.model_types)}"
            )
        return folder
    if folder.exists():
        raise UsageError(f"{folder} is a file; give the directory that holds config.json and the weights")
    if _HUB_ID.fullmatch(checkpoint):
        return _download(checkpoint)
    raise UnknownNameError(
        f"{unknown_name('directory or bundled checkpoint', checkpoint, spec.bundled)} "
        f"A checkpoint on the Hugging Face hub is written owner/name."
    )


def _model_type(folder: Path) -> str:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no config.json, so it is no checkpoint directory") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    model_type = config.get("model_type") if isinstance(config, dict) else None
    if not isinstance(model_type, str):
        raise CheckpointError(f"{path} names no model_type")
    return model_type


def _bundled(place: str) -> Path:
    package, _, name = place.partition(":")
    try:
        folder = Path(str(importlib.resources.files(package) / name))
    except ModuleNotFoundError as error:
        raise CheckpointError(f"the bundled checkpoint {place!r} cannot be found: {error}") from error
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"the bundled checkpoint {place!r} is not part of this installation: no {folder}/config.json"
        )
    return folder


def _download(hub_id: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise CheckpointError(
            f"there is no directory {hub_id!r}, and to take it from the Hugging Face hub huggingface-hub is missing: "
            f"pip install 'kaminari-core[hub]'"
        ) from None
    logger.info("taking %s from the Hugging Face hub", hub_id)
    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(_HUB_FILES)))
    except Exception as error:
        # The library raises errors of its own, of its HTTP client and of the operating system; all mean the same here.
        raise CheckpointError(
            f"there is no directory {hub_id!r}, and the Hugging Face hub did not give it: {type(error).__name__}: {error}"
        ) from error
