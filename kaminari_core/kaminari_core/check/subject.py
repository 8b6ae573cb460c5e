"""The model under check: loaded once in float32, with the conversations, reference runs and engines that the items share."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from kaminari_core.check.compared import Difference, difference
from kaminari_core.config import EngineConfig
from kaminari_core.engine import Engine
from kaminari_core.errors import KaminariError
from kaminari_core.flow import ImagePart, Message, Part, Prepared, Request, Role, TextPart
from kaminari_core.parity import greedy
from kaminari_core.placement import resolve_device
from kaminari_core.progress import silent
from kaminari_core.protocols import Cache, Model, ModelShape, Reference, ReferenceRun, Waiting
from kaminari_core.registry import Registry
from kaminari_core.specs import ModelSpec
from kaminari_core.tasks import FIELD

TEXT = "The total of 3 items is 12.50 and the total of 4 items is"
LONGEST = 1024
"""Cache positions: room for two pictures and two length buckets, and no more for the sake of large models."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How thorough a check is: greedy steps per conversation, and the largest difference between logits that still counts as
    rounding, in float32."""

    device: str = "auto"
    steps: int = 24
    tolerance: float = 1e-3
    compile: bool = True


class Subject:
    """One model and one checkpoint. Everything is made when an item first asks for it."""

    def __init__(self, registry: Registry, spec: ModelSpec, checkpoint: Path, settings: Settings) -> None:
        self.registry, self.spec, self.checkpoint, self.settings = registry, spec, checkpoint, settings
        self._runs: dict[str, tuple[ReferenceRun, ReferenceRun]] = {}

    @cached_property
    def device(self) -> torch.device:
        """Where the check runs."""
        return resolve_device(self.settings.device)

    @cached_property
    def config(self) -> EngineConfig:
        """Eager, float32, exact sizing; `max_length` is no longer than the model's longest sequence."""
        return replace(self._asked, max_length=min(LONGEST, self.model.shape.max_positions))

    @property
    def _asked(self) -> EngineConfig:
        return EngineConfig(
            device=str(self.device), dtype="float32", sizing="exact", visual_tokens=256, max_length=LONGEST,
            slots=3, compile=False, draft_auto=False, draft_tokens=3,
        )  # fmt: skip

    @cached_property
    def model(self) -> Model:
        """The checkpoint as the plugin loads it."""
        return self.load(self.checkpoint)

    def load(self, checkpoint: Path, **changes: Any) -> Model:
        """Load a checkpoint directory, with other settings if given."""
        model: Model = self.spec.load()(checkpoint, replace(self._asked, **changes), self.device, silent)
        return model

    @cached_property
    def reference(self) -> Reference | None:
        """The stock implementation, None when the plugin names none."""
        if self.spec.reference is None:
            return None
        reference: Reference = self.spec.load_reference()(self.checkpoint, self.device, torch.float32)
        return reference

    @cached_property
    def requests(self) -> Mapping[str, Request]:
        """The conversations to compare on: text alone, and with one picture, two pictures and two turns where it takes them."""
        return conversations(self.model.shape, self.spec)

    @cached_property
    def prepared(self) -> Mapping[str, Prepared]:
        """Each conversation as the model prepares it."""
        return {name: self.model.prepare(request) for name, request in self.requests.items()}

    def reference_runs(self, name: str) -> tuple[ReferenceRun, ReferenceRun]:
        """One conversation decoded greedily by us and by the stock implementation, logits kept."""
        if name not in self._runs:
            assert self.reference is not None, "there is no stock implementation"
            prepared, steps = self.prepared[name], self.settings.steps
            ours = greedy(self.model, prepared, steps)
            self._runs[name] = ours, self.reference.greedy(prepared, steps, logits=True)
        return self._runs[name]

    def differences(self) -> dict[str, Difference]:
        """How far we are from the stock implementation on each conversation."""
        return {name: difference(*self.reference_runs(name)) for name in self.requests}

    def cache(self, model: Model, config: EngineConfig) -> Cache:
        """A cache as the engine gets it, full of garbage: nothing may be read that was not written."""
        width = 1 if config.draft == "none" else config.draft_tokens + 1
        target = self.registry.cache(config.cache).load()
        cache: Cache = target(model.shape, config.slots, config.max_length, model.device, model.dtype, width=width)
        generator = torch.Generator(model.device).manual_seed(0)
        for buffer in (cache.keys, cache.values):
            buffer.normal_(0, 10, generator=generator)
        return cache

    @contextlib.contextmanager
    def engine(self, *, together: int = 1, model: Model | None = None, **changes: Any) -> Iterator[Engine]:
        """A running engine for the model, which begins when `together` requests wait."""
        model, config = model or self.model, replace(self.config, **changes)
        engine = Engine(self.spec.name, model, self.cache(model, config), Together(together), config)
        with engine:
            yield engine


class Together:
    """First come first served, once `count` requests are there: so that rows share steps however fast the machine is."""

    def __init__(self, count: int) -> None:
        self._missing = count

    def admit(self, waiting: Sequence[Waiting], free: int, running: int, now: float) -> Sequence[str]:
        """The oldest `free` requests."""
        if len(waiting) < self._missing:
            return []
        self._missing = 0
        return [request.id for request in waiting[:free]]


def conversations(shape: ModelShape, spec: ModelSpec) -> dict[str, Request]:
    """Requests that a model of this shape must be able to serve."""
    words = next((phrase for phrase in spec.tasks.values() if FIELD not in phrase), "Read this.")
    found: dict[str, tuple[Message, ...]] = {"text": (_turn("user", TEXT),)}
    if shape.image_unit is None:
        found["two turns"] = (_turn("user", TEXT), _turn("assistant", "16.70"), _turn("user", "Is it?"))
    else:
        found |= {
            "one picture": (_turn("user", picture(200, 150), words),),
            "two pictures": (_turn("user", picture(100, 60, 1), "and", picture(90, 200, 2), words),),
            "two turns": (
                _turn("user", picture(100, 120, 3), words),
                _turn("assistant", "An invoice."),
                _turn("user", "And this?", picture(130, 70, 4)),
            ),
        }
    return {name: Request(messages) for name, messages in found.items()}


def picture(width: int, height: int, seed: int = 0) -> ImagePart:
    """A PNG of coloured noise in blocks of 5 pixels, so that no two visual tokens are alike."""
    from PIL import Image

    blocks = torch.randint(0, 256, (height // 5 + 1, width // 5 + 1, 3), generator=torch.Generator().manual_seed(seed))
    pixels = blocks.repeat_interleave(5, 0).repeat_interleave(5, 1)[:height, :width].to(torch.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels.contiguous().numpy()).save(buffer, "PNG")
    return ImagePart(buffer.getvalue(), f"picture of {width} x {height}")


def describe(error: Exception) -> str:
    """One line about an error."""
    message = " ".join(str(error).split())
    return message if isinstance(error, KaminariError) else f"{type(error).__name__}: {message}"


def _turn(role: Role, *parts: str | ImagePart) -> Message:
    made: list[Part] = [TextPart(part) if isinstance(part, str) else part for part in parts]
    return Message(role, tuple(made))
