"""Sampling on every device; see test_device.py for how a card is chosen."""

from __future__ import annotations

import os

import pytest
import torch

from kaminari_core.flow import Sampling
from kaminari_core.sampling import RowSampler

DEVICE = torch.device(os.environ.get("KAMINARI_TEST_DEVICE", "cpu"))
SETTINGS = {
    "plain": Sampling(temperature=1.0, seed=1),
    "top-k": Sampling(temperature=1.0, top_k=5, seed=1),
    "top-p": Sampling(temperature=0.8, top_p=0.9, seed=1),
    "penalties": Sampling(repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.1, logit_bias={3: 1.0}),
    "all": Sampling(temperature=0.8, top_k=40, top_p=0.9, seed=1, repetition_penalty=1.2, presence_penalty=0.5),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_choosing_and_accepting_never_wait_for_the_device(name: str) -> None:
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(DEVICE)

    def run(strict: bool) -> list[int]:
        sampler = RowSampler(SETTINGS[name], (1, 2, 3), 1000, DEVICE)
        chosen = []
        for token in range(6):
            if strict and DEVICE.type == "cuda":
                torch.cuda.set_sync_debug_mode("error")
            try:
                chosen.append(sampler.choose(logits))
                sampler.accept(token)
            finally:
                if strict and DEVICE.type == "cuda":
                    torch.cuda.set_sync_debug_mode("default")
        return torch.stack(chosen).tolist()

    assert run(strict=True) == run(strict=False)
