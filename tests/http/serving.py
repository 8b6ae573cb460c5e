"""What the tests are made of: real engines behind real servers on a loopback port, and pictures."""

from __future__ import annotations

import base64
import io
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any

import httpx2
import torch
from openai import OpenAI
from PIL import Image
from starlette.applications import Starlette

from kaminari_core.cache import StaticCache
from kaminari_core.config import EngineConfig
from kaminari_core.engine import Engine
from kaminari_core.protocols import Model, Scheduler
from kaminari_core.registry import load_registry
from kaminari_core.scheduler import ContinuousScheduler
from kaminari_http.app import build_app
from kaminari_http.config import AppConfig
from kaminari_http.server import Server, listen

PLUGIN = EntryPoint("http", "kaminari_http.plugin", "kaminari")


@dataclass(frozen=True)
class Running:
    """A server that runs, its engine and its app."""

    url: str
    engine: Engine
    app: Starlette
    http: httpx2.Client
    clients: ExitStack

    def openai(self, **settings: Any) -> OpenAI:
        """A client that is closed with the server: one whose stream was left lying would leak its socket, some time later."""
        client = OpenAI(base_url=f"{self.url}/v1", **{"api_key": "none", "max_retries": 0, **settings})
        return self.clients.enter_context(client)

    def post(self, path: str, body: Any, **settings: Any) -> httpx2.Response:
        return self.http.post(path, json=body, **settings)

    def chat(self, text: str, **fields: Any) -> httpx2.Response:
        return self.post("/v1/chat/completions", chat_body(text, **fields))

    def settle(self, seconds: float = 5.0) -> None:
        """Wait until the engine serves nothing, and fail if that takes longer."""
        deadline = time.monotonic() + seconds
        while (stats := self.engine.stats()).running or stats.waiting or stats.preparing or stats.slots_busy:
            assert time.monotonic() < deadline, stats
            time.sleep(0.005)


Start = Callable[..., Running]


def chat_body(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "echo", "messages": [{"role": "user", "content": text}], **fields}


def open_engine(
    kind: Callable[[EngineConfig], Model],
    *,
    scheduler: Callable[[EngineConfig], Scheduler] = ContinuousScheduler,
    **settings: Any,
) -> Engine:
    config = EngineConfig(
        **{"device": "cpu", "dtype": "float32", "compile": False, "slots": 4, "max_length": 512, **settings}
    )
    model = kind(config)
    cache = StaticCache(model.shape, config.slots, config.max_length, torch.device("cpu"), torch.float32)
    engine = Engine("echo", model, cache, scheduler(config), config, tasks={"ocr": "read", "caption": "describe"})
    engine.start()
    return engine


@contextmanager
def running(engine: Engine, *, name: str = "echo", **settings: Any) -> Iterator[Running]:
    engines: Mapping[str, Engine] = {name: engine}
    app = build_app(engines, load_registry([PLUGIN]).routes(engines), AppConfig(**settings))
    with listen("127.0.0.1", 0) as listener, Server(app, listener) as server:
        with httpx2.Client(base_url=server.url, timeout=30) as client, ExitStack() as clients:
            yield Running(server.url, engine, app, client, clients)
        engine.close()


def picture(color: str | tuple[int, ...] = "red", size: tuple[int, int] = (64, 64), kind: str = "PNG") -> str:
    """A picture as a data: URL."""
    file = io.BytesIO()
    Image.new("RGB", size, color).save(file, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def picture_message(*urls: str, text: str = "read") -> dict[str, Any]:
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"role": "user", "content": [*images, {"type": "text", "text": text}]}


def raw_connection(url: str) -> socket.socket:
    """A plain socket to a server, for what no client library would send."""
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)
