"""Real servers for the tests: two that are shared, and a factory for those with settings of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import pytest

from kaminari_core.config import EngineConfig
from kaminari_core.protocols import Model
from kaminari_core.testing import EchoModel, TinyModel
from tests.http.serving import Running, Start, open_engine, running


@pytest.fixture(scope="session")
def echo() -> Iterator[Running]:
    """A server that says what the last message says, byte by byte."""
    with running(open_engine(EchoModel)) as server:
        yield server


@pytest.fixture(scope="session")
def tiny() -> Iterator[Running]:
    """A server of a small random decoder that takes pictures."""
    with running(open_engine(TinyModel), name="tiny") as server:
        yield server


@pytest.fixture
def start() -> Iterator[Start]:
    """Start servers with settings of their own: `start(kind_of_model, app={...}, engine settings...)`."""
    with ExitStack() as servers:

        def begin(
            kind: Callable[[EngineConfig], Model], *, app: Mapping[str, Any] | None = None, **settings: Any
        ) -> Running:
            return servers.enter_context(running(open_engine(kind, **settings), **(app or {})))

        yield begin
