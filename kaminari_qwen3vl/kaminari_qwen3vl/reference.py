"""The stock implementation: the class of transformers, generating as its users would, for parity checks and benchmarks.

It takes the same `Prepared` as the engine, but nothing of our arithmetic: `generate` computes positions from the token types.
Passing those is not optional, since without them it silently falls back to text positions; and generating through `generate`,
which resets the position offset that the class keeps between calls, is why no stale one can leak from the request before.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kaminari_core.flow import Prepared
from kaminari_core.protocols import ReferenceMode, ReferenceRun
from kaminari_qwen3vl.vision import quiet_import


class StockQwen3VL:
    """A checkpoint loaded by transformers: `kaminari_core.protocols.Reference`."""

    def __init__(self, model: Any) -> None:
        self._model = model
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
            **(_static(max_length, self._model.device) if mode == "static" else {}),
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


def _static(max_length: int, device: torch.device) -> dict[str, Any]:
    """The strongest stock settings: without max_cache_len every longer prompt compiles again."""
    from transformers import CompileConfig

    compiling = CompileConfig(fullgraph=True, mode="reduce-overhead" if device.type == "cuda" else "default")
    # On a CPU, generate compiles only when told so.
    compiling._compile_all_devices = True
    return {"cache_implementation": "static", "max_cache_len": max_length, "compile_config": compiling}


def load(checkpoint: Path, device: torch.device, dtype: torch.dtype) -> StockQwen3VL:
    """Load a checkpoint directory with the class of transformers, its patch embedding as a Linear like ours."""
    with quiet_import():
        from transformers import AutoModelForImageTextToText

        model = AutoModelForImageTextToText.from_pretrained(
            checkpoint, dtype=dtype, local_files_only=True, fusion_config={"patch_embeddings": True}
        )
    return StockQwen3VL(model.to(device).eval())
