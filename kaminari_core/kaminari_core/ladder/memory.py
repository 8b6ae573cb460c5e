"""The peak memory of a rung, in a process that does nothing else: everything from its start to the end of a short reply."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from kaminari_core.config import EngineConfig

NEW_TOKENS = 2
"""Enough for a prefill and a decode step."""


def peak_of(model: str, checkpoint: Path, config: EngineConfig, prompt_tokens: int, threads: int, stock: bool) -> int:
    """Peak bytes of a fresh process that loads and answers once, of ours or of the `stock` implementation."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_peak, model, str(checkpoint), config, prompt_tokens, threads, stock).result()


def _peak(model: str, checkpoint: str, config: EngineConfig, prompt_tokens: int, threads: int, stock: bool) -> int:
    import torch

    torch.set_num_threads(threads)
    return (_stock if stock else _ours)(model, checkpoint, config, prompt_tokens)


def _ours(model: str, checkpoint: str, config: EngineConfig, prompt_tokens: int) -> int:
    from kaminari_core.bench import prompt_of
    from kaminari_core.ladder.contenders import serve_together
    from kaminari_core.launch import open_engine
    from kaminari_core.progress import silent
    from kaminari_core.registry import load_registry, selected_plugins
    from kaminari_core.stats import peak_memory

    engine = open_engine(load_registry(only=selected_plugins()), model, checkpoint, config, silent)
    try:
        serve_together(engine, prompt_of(engine, prompt_tokens), NEW_TOKENS, 1)
        return peak_memory(engine.model.device)
    finally:
        engine.close()


def _stock(model: str, checkpoint: str, config: EngineConfig, prompt_tokens: int) -> int:
    """The stock class alone: our model is never loaded, so the prompt is ids of nothing in particular."""
    import torch

    from kaminari_core.checkpoint import resolve
    from kaminari_core.flow import Prepared, Request
    from kaminari_core.placement import resolve_device, resolve_dtype
    from kaminari_core.registry import load_registry, selected_plugins
    from kaminari_core.stats import peak_memory

    spec, folder = resolve(load_registry(only=selected_plugins()), model, checkpoint)
    device = resolve_device(config.device)
    reference = spec.load_reference()(folder, device, resolve_dtype(config.dtype, device, folder))
    tokens = tuple(range(100, 100 + prompt_tokens))
    prepared = Prepared(Request(()), tokens, torch.arange(prompt_tokens).expand(3, -1), next_position=prompt_tokens)
    reference.greedy(prepared, NEW_TOKENS)
    return peak_memory(device)
