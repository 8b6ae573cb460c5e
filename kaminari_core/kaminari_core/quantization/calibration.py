"""What the inputs of the layers to be converted look like on real pages: the size of each channel, and some rows of them.

The full-precision model reads each page eagerly, prompt and reply, while hooks on its linear layers look on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from kaminari_core.cache import StaticCache
from kaminari_core.config import EngineConfig
from kaminari_core.decode import run_layer
from kaminari_core.errors import UsageError
from kaminari_core.flow import ImagePart, Message, Request, TextPart
from kaminari_core.placement import resolve_device
from kaminari_core.protocols import Model, Progress, Step
from kaminari_core.quantization.selection import linear_layers
from kaminari_core.specs import ModelSpec
from kaminari_core.tasks import FIELD

PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".tif", ".tiff", ".bmp")
MOST_PAGES = 16
REPLY_TOKENS = 96
SAMPLED_ROWS = 128
_FEW = 8


@dataclass(frozen=True, slots=True)
class Activations:
    """The inputs of one layer: the mean square of each channel (K), and up to `SAMPLED_ROWS` of them (rows, K), float32."""

    importance: Tensor
    sample: Tensor


def calibration_pages(folder: Path) -> list[Path]:
    """The pictures of a directory, at most `MOST_PAGES`, evenly spread over their names. Raises UsageError without any."""
    if not folder.is_dir():
        raise UsageError(f"--calibrate {folder} is no directory; give one with pictures of pages")
    found = sorted(file for file in folder.iterdir() if file.suffix.lower() in PICTURES)
    if not found:
        raise UsageError(f"--calibrate {folder} holds no pictures ({', '.join(PICTURES)})")
    count = min(MOST_PAGES, len(found))
    return [found[index * len(found) // count] for index in range(count)]


def calibrate(
    spec: ModelSpec, checkpoint: Path, pages: Sequence[Path], config: EngineConfig, progress: Progress
) -> dict[str, Activations]:
    """Let a model read pages; returns what each layer that could be converted saw, by its name.

    The whole model is loaded for it, in full precision. Raises KaminariError for pages that cannot be read.
    """
    device = resolve_device(config.device)
    model: Model = spec.load()(checkpoint, config, device, progress)
    words = spec.tasks.get("ocr") or next((text for text in spec.tasks.values() if FIELD not in text), "Read this.")
    with _watched(linear_layers(model)) as watchers:
        for done, page in enumerate(pages):
            progress("calibrate", done, len(pages))
            part = ImagePart(page.read_bytes(), page.name)
            _read(model, Request((Message("user", (part, TextPart(words))),)))
        progress("calibrate", len(pages), len(pages))
    found = {name: watcher.result() for name, watcher in watchers.items() if watcher.count}
    if not found:
        raise UsageError(f"no layer of {spec.name} that could be converted computed anything on the calibration pages")
    return found


def _read(model: Model, request: Request) -> None:
    """Prompt and greedy reply of one request."""
    prepared = model.prepare(request)
    cache = StaticCache(model.shape, 1, prepared.length + REPLY_TOKENS, model.device, model.dtype)
    token = int(model.prefill(model.embed(prepared), 0, prepared.length, cache, cache.claim()).argmax())
    for step in range(REPLY_TOKENS):
        if token in model.shape.end_tokens:
            return
        fed = (token, prepared.next_position + step, prepared.length + step)
        ids, positions, cursors = (torch.tensor([[value]], device=model.device) for value in fed)
        with torch.inference_mode():
            logits = model.decode(Step(ids, positions, cursors, prepared.length + step + 1), cache, run_layer)
        token = int(logits[0, 0].argmax())


class _Watcher:
    """Adds up the squares of a layer's inputs and keeps some rows: all of a few calls, then ever fewer of each."""

    def __init__(self, columns: int) -> None:
        self.count = 0
        self._squares = torch.zeros(columns)
        self._rows: list[Tensor] = []
        self._generator = torch.Generator().manual_seed(0)

    def __call__(self, module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        x = arguments[0].detach().reshape(-1, arguments[0].shape[-1]).to("cpu", torch.float32)
        self._squares += x.square().sum(0)
        self.count += len(x)
        self._rows.append(x[torch.randperm(len(x), generator=self._generator)[:_FEW]])
        if len(self._rows) > 4 * SAMPLED_ROWS:
            self._rows = [self._thinned()]

    def _thinned(self) -> Tensor:
        rows = torch.cat(self._rows)
        return rows[torch.randperm(len(rows), generator=self._generator)[:SAMPLED_ROWS]]

    def result(self) -> Activations:
        """What was seen so far."""
        return Activations(self._squares / self.count, self._thinned())


@contextmanager
def _watched(layers: Mapping[str, nn.Linear]) -> Iterator[dict[str, _Watcher]]:
    watchers = {name: _Watcher(layer.in_features) for name, layer in layers.items()}
    hooks = [layer.register_forward_pre_hook(watchers[name]) for name, layer in layers.items()]
    try:
        yield watchers
    finally:
        for hook in hooks:
            hook.remove()
