"""What the inputs of the layers to be converted look like on real pages: a sample of them.

The full-precision model reads each page eagerly, prompt and reply, while hooks on its linear layers look on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from kaminari_core.cache import StaticCache
from kaminari_core.config import EngineConfig
from kaminari_core.errors import UsageError
from kaminari_core.flow import ImagePart, Message, Request, TextPart
from kaminari_core.layer_call import run_layer
from kaminari_core.placement import resolve_device
from kaminari_core.protocols import Model, Progress, Step
from kaminari_core.quantization.selection import linear_layers
from kaminari_core.specs import ModelSpec
from kaminari_core.tasks import FIELD

PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".tif", ".tiff", ".bmp")
MOST_PAGES = 32
REPLY_TOKENS = 32
SAMPLED_ROWS = 2048
_ROWS_OF_A_CALL = 64


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
) -> dict[str, Tensor]:
    """Let a model read pages; returns inputs (samples, K) of each layer that could be converted, by its name.

    There are up to `SAMPLED_ROWS` of each, in the dtype that the model computes in, as those of all layers are in memory at
    once. The whole model is loaded for it, in full precision. Raises KaminariError for pages that cannot be read.
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
    found = {name: rows for name, watcher in watchers.items() if len(rows := watcher.sample())}
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
    """Keeps some of a layer's inputs: a few rows of each call, thinned as they become many."""

    def __init__(self) -> None:
        self._rows: list[Tensor] = []
        self._generator = torch.Generator().manual_seed(0)

    def __call__(self, module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        x = arguments[0].detach().reshape(-1, arguments[0].shape[-1]).cpu()
        self._rows.append(self._some(x, _ROWS_OF_A_CALL))
        if sum(len(rows) for rows in self._rows) > 2 * SAMPLED_ROWS:
            self._rows = [self.sample()]

    def sample(self) -> Tensor:
        """What was kept, (samples, K); no row where the layer was never called."""
        return self._some(torch.cat(self._rows), SAMPLED_ROWS) if self._rows else torch.empty(0)

    def _some(self, rows: Tensor, most: int) -> Tensor:
        return rows[torch.randperm(len(rows), generator=self._generator)[:most]]


@contextmanager
def _watched(layers: Mapping[str, nn.Linear]) -> Iterator[dict[str, _Watcher]]:
    watchers = {name: _Watcher() for name in layers}
    hooks = [layer.register_forward_pre_hook(watchers[name]) for name, layer in layers.items()]
    try:
        yield watchers
    finally:
        for hook in hooks:
            hook.remove()
