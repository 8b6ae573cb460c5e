"""From names to a running engine: the one place where a model, a cache, a scheduler and a configuration meet.

torch and the model's code are imported when an engine is opened, not before.
"""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from kaminari_core.checkpoint import checkpoint_bytes, resolve
from kaminari_core.config import EngineConfig
from kaminari_core.errors import UsageError
from kaminari_core.registry import Registry

if TYPE_CHECKING:
    import torch

    from kaminari_core.engine import Engine
    from kaminari_core.protocols import Progress

logger = logging.getLogger(__name__)

FLOAT32_BELOW = 1 << 30
"""On a CPU, checkpoints smaller than this many bytes are computed in float32 unless told otherwise."""


def open_engine(
    registry: Registry,
    model: str,
    checkpoint: str | None,
    config: EngineConfig,
    progress: Progress,
    name: str | None = None,
    *,
    warm_up: bool = False,
) -> Engine:
    """Load a model and start an engine for it.

    `model` and `checkpoint` are as in `checkpoint.resolve`; `name` is the name it is served under, the model's own unless
    given. `warm_up` compiles every bucket of the decode step before the first request instead of when one needs it. The
    engine's `config` has `device` and `dtype` resolved, and `max_length` no longer than the model's longest sequence. Raises
    KaminariError; every name is checked before anything is loaded.
    """
    from kaminari_core.engine import Engine

    spec, folder = resolve(registry, model, checkpoint)
    cache_spec, scheduler_spec = registry.cache(config.cache), registry.scheduler(config.scheduler)
    if config.quantizer != "none":
        quantizer = registry.quantizer(config.quantizer)
        raise UsageError(f"the quantizer {quantizer.name!r} is known, but this version loads no quantized weights")
    device = resolve_device(config.device)
    dtype = str(resolve_dtype(config.dtype, device, folder)).removeprefix("torch.")
    config = dataclasses.replace(config, device=str(device), dtype=dtype)
    loaded = spec.load()(folder, config, device, progress)
    longest = loaded.shape.max_positions
    if config.max_length > longest:
        logger.info("max-length is lowered from %d to %d, the model's longest sequence", config.max_length, longest)
        config = dataclasses.replace(config, max_length=longest)
    width = 1 if config.draft == "none" else config.draft_tokens + 1
    cache = cache_spec.load()(loaded.shape, config.slots, config.max_length, device, loaded.dtype, width=width)
    scheduler = scheduler_spec.load()(config)
    engine = Engine(name or spec.name, loaded, cache, scheduler, config, tasks=spec.tasks)
    if warm_up and config.compile:
        engine.warm_up(progress)
    engine.start()
    return engine


def resolve_device(name: str) -> torch.device:
    """The device that `auto`, `cpu`, `cuda` or `cuda:N` means here. Raises UsageError when there is no such card."""
    import torch

    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"device is {name!r}; choose auto, cpu, cuda or cuda:N")
    if device.type == "cpu":
        return torch.device("cpu")
    if torch.version.cuda is None:
        raise UsageError(
            f"device is {name!r}, but this PyTorch ({torch.__version__}) is built without CUDA; use --device cpu"
        )
    count = torch.cuda.device_count()
    if count == 0:
        raise UsageError(
            f"device is {name!r}, but PyTorch sees no card: check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES"
        )
    index = device.index or 0
    if index >= count:
        raise UsageError(f"device is {name!r}, but there are {count} cards, counted from cuda:0")
    return torch.device("cuda", index)


def resolve_dtype(name: str, device: torch.device, checkpoint: Path) -> torch.dtype:
    """The dtype to compute in. `auto` is bfloat16, or float32 on a CPU for checkpoints smaller than `FLOAT32_BELOW`."""
    import torch

    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name in dtypes:
        return dtypes[name]
    if name != "auto":
        raise UsageError(f"dtype is {name!r}; choose auto, {', '.join(dtypes)}")
    small = checkpoint_bytes(checkpoint) < FLOAT32_BELOW
    return torch.float32 if device.type == "cpu" and small else torch.bfloat16
