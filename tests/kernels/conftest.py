"""The compiled kernels, and each instruction set that this processor has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kaminari_core.kernels import library, operators
from kaminari_core.progress import silent


@pytest.fixture(scope="session")
def kernels() -> None:
    """The library in this process. Only another processor is a reason to go without: the compiler is needed anyway."""
    if reason := library.unsupported():
        pytest.skip(reason)
    library.load(silent)


@pytest.fixture(params=["portable", "avx2", "avx512", "avx512bf16"])
def instructions(request: pytest.FixtureRequest, kernels: None) -> Iterator[str]:
    """Each instruction set in turn, used until the test ends."""
    if not operators.use_instructions(request.param):
        pytest.skip(f"this processor has no {request.param}")
    yield request.param
    assert operators.use_instructions("")
