"""Before an engine starts: the plan for its configuration, and what becomes of one that does not fit."""

from __future__ import annotations

import logging
from pathlib import Path

from kaminari_core.config import EngineConfig
from kaminari_core.errors import UsageError
from kaminari_core.fit.cases import make_case
from kaminari_core.fit.choice import Answer, answer, flags
from kaminari_core.fit.memory import Budget, free_on_cpu, given
from kaminari_core.fit.report import refusal, size
from kaminari_core.specs import ModelSpec

logger = logging.getLogger(__name__)


def planned(
    spec: ModelSpec, folder: Path, config: EngineConfig, device: str, *, on_card: Budget | None = None
) -> EngineConfig:
    """The configuration to start with on a kind of device: as it is when it fits, with less of it for `config.auto`.

    `on_card` is what is free there, for a device that is one. Raises UsageError, with the numbers and the options that would
    fit, when it does not fit. A model without a footprint, or a machine that does not tell its memory, is logged and started.
    """
    if not config.plan:
        return config
    if spec.footprint is None:
        logger.info("memory is not planned: the plugin of the model %r names no footprint", spec.name)
        return config
    budget = given(config.vram) if config.vram != "auto" else on_card if device == "cuda" else free_on_cpu()
    if budget is None:
        logger.info("memory is not planned: this system does not tell how much is free; give it with --vram")
        return config
    found = answer(make_case(spec, folder, config, device), config, budget)
    if found.fits:
        logger.info("planned: %s of %s (%s)", size(found.needed), size(budget.bytes), budget.source)
        return config
    return _lowered(found, config)


def _lowered(found: Answer, config: EngineConfig) -> EngineConfig:
    """What fits in place of what was asked for. Raises UsageError unless `auto` allows it, or when nothing does."""
    if not config.auto or found.start is None:
        raise UsageError(refusal(found))
    logger.warning(
        "what was asked for needs %s of %s (%s), so this starts with less: %s (asked: %s)",
        size(found.needed),
        size(found.budget.bytes),
        found.budget.source,
        flags(found.start, config),
        flags(config),
    )
    return found.start
