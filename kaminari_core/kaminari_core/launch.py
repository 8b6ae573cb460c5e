"""From names to a running engine: the one place where a model, a cache, a scheduler and a configuration meet.

torch and the model's code are imported when an engine is opened, not before.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING

from kaminari_core.checkpoint import resolve
from kaminari_core.config import EngineConfig
from kaminari_core.evidence.calibration import Calibration, calibration_of
from kaminari_core.fit.memory import Budget
from kaminari_core.fit.start import planned
from kaminari_core.quantization.choice import quantizer_of
from kaminari_core.registry import Registry

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from kaminari_core.engine import Engine
    from kaminari_core.protocols import Model, Progress
    from kaminari_core.specs import ModelSpec
    from kaminari_core.supervise.engine import SupervisedEngine
    from kaminari_core.watch import Watch

logger = logging.getLogger(__name__)


def open_engine(
    registry: Registry,
    model: str,
    checkpoint: str | None,
    config: EngineConfig,
    progress: Progress,
    name: str | None = None,
    *,
    warm_up: bool = False,
    watch: Watch | None = None,
) -> Engine:
    """Load a model and start an engine for it, in this process.

    `model` and `checkpoint` are as in `checkpoint.resolve`; `name` is the name it is served under, the model's own unless
    given. `warm_up` compiles every bucket of the decode step before the first request instead of when one needs it. The
    engine's `config` has `device` and `dtype` resolved, and `max_length` no longer than the model's longest sequence. `watch` is
    told what the engine does. Raises KaminariError; every name is checked before anything is loaded.
    """
    from kaminari_core.threads import release_helpers

    spec, folder = resolve(registry, model, checkpoint)
    registry.cache(config.cache), registry.scheduler(config.scheduler)
    calibration = calibration_of(folder, config.calibration)
    loaded, config = load_model(registry, spec, folder, config, progress)
    engine = engine_over(registry, spec, loaded, config, name, watch=watch, calibration=calibration)
    if warm_up and config.compile:
        from kaminari_core.vision_parts import warm_up as warm_up_vision

        warm_up_vision(loaded, progress)
        engine.warm_up(progress)
    release_helpers()
    engine.start()
    return engine


def load_model(
    registry: Registry, spec: ModelSpec, folder: Path, config: EngineConfig, progress: Progress
) -> tuple[Model, EngineConfig]:
    """Load the weights of a model; returns it and the configuration with what depends on it resolved, as `open_engine` says."""
    from kaminari_core.kernels.adoption import adopt, choose
    from kaminari_core.placement import resolve_device, resolve_dtype
    from kaminari_core.vision_parts import compile_winners

    config = dataclasses.replace(config, quantizer=check_quantizer(registry, spec, folder, config))
    device = resolve_device(config.device)
    dtype = str(resolve_dtype(config.dtype, device, folder)).removeprefix("torch.")
    config = dataclasses.replace(config, device=str(device), dtype=dtype)
    config = planned(spec, folder, config, device.type, on_card=_free_on_card(device))
    config = dataclasses.replace(config, kernels=choose(config.kernels, device, progress))
    loaded = spec.load()(folder, config, device, progress)
    compile_winners(loaded, spec.name, config)
    if config.kernels == "own":
        adopt(loaded, config.activation_bits)
    longest = loaded.shape.max_positions
    if config.max_length > longest:
        logger.info("max-length is lowered from %d to %d, the model's longest sequence", config.max_length, longest)
        config = dataclasses.replace(config, max_length=longest)
    return loaded, config


def _free_on_card(device: torch.device) -> Budget | None:
    """What is free on a card; None for another device. What this process has taken of it already is not free any more."""
    import torch

    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return Budget(free, f"free on {device}", whole=False)


def check_quantizer(registry: Registry, spec: ModelSpec, folder: Path, config: EngineConfig) -> str:
    """The name of the quantizer that the checkpoint was packed with, `none` without one; it must be what is asked for.

    Raises UsageError as `quantization.choice.quantizer_of` does, and UnknownNameError for a quantizer that no plugin offers.
    """
    if config.quantizer not in ("auto", "none"):
        registry.quantizer(config.quantizer)
    return quantizer_of(folder, config.quantizer, spec.name)


def engine_over(
    registry: Registry,
    spec: ModelSpec,
    loaded: Model,
    config: EngineConfig,
    name: str | None = None,
    *,
    watch: Watch | None = None,
    calibration: Calibration | None = None,
) -> Engine:
    """An engine, not started, with a cache and a scheduler of its own over a loaded model. Several may share one model."""
    from kaminari_core.engine import Engine

    cache_spec, scheduler_spec = registry.cache(config.cache), registry.scheduler(config.scheduler)
    width = 1 if config.draft == "none" else config.draft_tokens + 1
    cache = cache_spec.load()(loaded.shape, config.slots, config.max_length, loaded.device, loaded.dtype, width=width)
    scheduler = scheduler_spec.load()(config)
    return Engine(
        name or spec.name, loaded, cache, scheduler, config, tasks=spec.tasks, watch=watch, calibration=calibration
    )


def open_supervised(
    registry: Registry,
    model: str,
    checkpoint: str | None,
    config: EngineConfig,
    progress: Progress,
    name: str | None = None,
    *,
    warm_up: bool = False,
) -> SupervisedEngine:
    """As `open_engine`, in a process of its own, which is replaced when it fails. See `supervise`.

    That process loads the same plugins, by the entry points of `registry`, and computes with as many threads as this one would.
    As it is spawned, a script that calls this must be importable: guard its start with `if __name__ == "__main__"`.
    """
    import torch

    from kaminari_core.supervise.engine import SupervisedEngine
    from kaminari_core.supervise.messages import Setup

    spec, folder = resolve(registry, model, checkpoint)
    registry.cache(config.cache), registry.scheduler(config.scheduler)
    check_quantizer(registry, spec, folder, config)
    calibration_of(folder, config.calibration)
    setup = Setup(
        plugins=tuple((plugin.name, plugin.target) for plugin in registry.plugins),
        model=spec.name,
        checkpoint=str(folder),
        config=config,
        name=name,
        warm_up=warm_up,
        threads=torch.get_num_threads(),
        log_level=logging.getLogger().getEffectiveLevel(),
    )
    return SupervisedEngine(setup, progress)
