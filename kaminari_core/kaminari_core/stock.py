"""Drives the stock implementation of a model: a class of transformers, generating as its users would, to be compared with.

Model packages load the class; what is done with it is the same for all of them and stands here, without importing the library.
A run takes the same `Prepared` as the engine, but nothing of our arithmetic: `generate` computes positions from the token types.
Passing those is not optional, since without them it silently falls back to text positions; and generating through `generate`,
which resets the position offset that the classes keep between calls, is why no stale one can leak from the request before.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kaminari_core.flow import Prepared
from kaminari_core.protocols import ReferenceMode, ReferenceRun


class StockModel:
    """A checkpoint loaded by transformers: `kaminari_core.protocols.Reference`.

    `compiling(mode)` makes the library's `CompileConfig` for fullgraph compilation in that mode of torch.compile.
    """

    def __init__(self, model: Any, compiling: Callable[[str], Any]) -> None:
        self._model, self._compiling = model, compiling
        # Never stops: a run is as long as was asked for.
        model.generation_config.eos_token_id = None

    def greedy(
        self,
        prepared: Prepared,
        steps: int,
        *,
        mode: ReferenceMode = "dynamic",
        max_length: int = 0,
        logits: bool = False,
    ) -> ReferenceRun:
        """Decode `steps` tokens greedily, past end tokens.

        `static` compiles the decode step over a static cache of `max_length` positions; the first such call compiles, so a
        benchmark runs it once before it measures. `logits` keeps those of every step, float32 (steps, vocabulary).
        """
        clock = _Clock(self._model.device)
        output = self._model.generate(
            **self._inputs(prepared),
            **(self._static(max_length) if mode == "static" else {}),
            do_sample=False,
            max_new_tokens=steps,
            output_logits=logits,
            return_dict_in_generate=True,
            streamer=clock,
        )
        tokens = tuple(output.sequences[0, prepared.length :].tolist())
        kept = torch.cat(output.logits).float() if logits else None
        return ReferenceRun(tokens, kept, clock.first - clock.started, clock.last - clock.first)

    def _inputs(self, prepared: Prepared) -> dict[str, Tensor]:
        device = self._model.device
        tokens = torch.tensor([prepared.tokens], device=device)
        inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        if prepared.patches:
            inputs["mm_token_type_ids"] = (tokens == self._model.config.image_token_id).int()
            inputs["pixel_values"] = torch.cat([patches.values for patches in prepared.patches]).to(device)
            inputs["image_grid_thw"] = torch.tensor([patches.grid for patches in prepared.patches], device=device)
        return inputs

    def _static(self, max_length: int) -> dict[str, Any]:
        """The strongest stock settings: without max_cache_len every longer prompt compiles again."""
        compiling = self._compiling("reduce-overhead" if self._model.device.type == "cuda" else "default")
        # On a CPU, generate compiles only when told so.
        compiling._compile_all_devices = True
        return {"cache_implementation": "static", "max_cache_len": max_length, "compile_config": compiling}


class _Clock:
    """A streamer that only notes when tokens come: the prompt first, then one at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.started, self.first, self.last = time.perf_counter(), 0.0, 0.0

    def put(self, _tokens: Tensor) -> None:
        """Called with the prompt, then with each token."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        if self.last == 0.0:
            self.last = self.started
            return
        self.first = self.first or now
        self.last = now

    def end(self) -> None:
        """Called when the reply is complete."""


@contextmanager
def quiet_import() -> Iterator[None]:
    """Keep what importing the model classes of transformers logs about torchao's optional parts from users."""
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
