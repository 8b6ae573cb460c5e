"""Two model packages in one server, and tasks that take a template."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx2
import pytest

from kaminari_core.config import EngineConfig
from kaminari_core.engine import Engine
from kaminari_core.launch import open_engine
from kaminari_core.progress import silent
from kaminari_core.registry import load_registry
from kaminari_http.app import build_app
from kaminari_http.config import AppConfig
from kaminari_http.server import Server, listen
from scripts.make_random_checkpoint import make_checkpoint
from tests.http.serving import Running, picture, picture_message

SIZES = {"qwen3vl": "tiny", "glmocr": "tiny-glmocr"}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    registry = load_registry(only=frozenset({"core", "http", *SIZES}))
    engines: dict[str, Engine] = {}
    for name, size in SIZES.items():
        draft: Any = "mtp" if name == "glmocr" else "prompt-lookup"
        config = EngineConfig(
            device="cpu",
            dtype="float32",
            compile=False,
            max_length=384,
            visual_tokens=64,
            draft=draft,
            draft_auto=False,
        )
        folder = make_checkpoint(tmp_path_factory.mktemp("random") / name, size)
        engines[name] = open_engine(registry, name, str(folder), config, silent)
    app = build_app(engines, registry.routes(engines), AppConfig())
    with listen("127.0.0.1", 0) as listener, Server(app, listener) as server:
        with httpx2.Client(base_url=server.url, timeout=30) as client, ExitStack() as clients:
            yield Running(server.url, engines["glmocr"], app, client, clients)
        for engine in engines.values():
            engine.close()


def test_both_models_answer_under_their_names(both: Running) -> None:
    assert {each["id"] for each in both.http.get("/v1/models").json()["data"]} == set(SIZES)
    texts = {}
    for name in SIZES:
        body = {"model": name, "messages": [picture_message(picture("navy", (160, 96)))], "max_tokens": 12}
        reply = both.post("/v1/chat/completions", body).json()
        assert reply["model"] == name
        texts[name] = reply["choices"][0]["message"]["content"]
        # 32 and 28 pixels a token: 5 x 3 fit the ladder of the one, 6 x 4 that of the other.
        assert reply["kaminari"]["saw"][0]["canvas"][0] % (32 if name == "qwen3vl" else 28) == 0
    assert len(set(texts.values())) == 2


def test_each_models_tasks_are_its_own(both: Running) -> None:
    images = [picture()]
    for name, task in [("qwen3vl", "caption"), ("glmocr", "table"), ("glmocr", "formula")]:
        reply = both.post("/generate", {"model": name, "task": task, "images": images, "max_tokens": 3})
        assert reply.status_code == 200, reply.text
    refused = both.post("/generate", {"model": "glmocr", "task": "caption", "images": images})
    assert refused.status_code == 400
    assert "extract, formula, ocr, table" in refused.json()["error"]["message"]


def test_a_template_fills_its_task(both: Running) -> None:
    body: dict[str, Any] = {"model": "glmocr", "task": "extract", "images": [picture()], "max_tokens": 5}
    short = both.post("/generate", {**body, "template": {"a": ""}}).json()
    long = both.post("/generate", {**body, "template": {"a": "", "items": [{"price": ""}]}}).json()
    assert long["usage"]["prompt_tokens"] > short["usage"]["prompt_tokens"]
    phrase = "\u8bf7\u6309\u4e0b\u5217JSON\u683c\u5f0f\u8f93\u51fa\u56fe\u4e2d\u4fe1\u606f:\n"
    prompt = {name: value for name, value in body.items() if name != "task"} | {"prompt": phrase + '{\n    "a": ""\n}'}
    assert both.post("/generate", prompt).json()["text"] == short["text"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"task": "extract"}, "needs a JSON template"),
        ({"task": "extract", "template": {}}, "a JSON object with fields"),
        ({"task": "extract", "template": {"a": 1}}, "template.a is 1"),
        ({"task": "table", "template": {"a": ""}}, "takes no template"),
        ({"template": {"a": ""}}, "takes no template"),
        ({"prompt": "Read.", "template": {"a": ""}}, "belongs to a task"),
        ({"messages": [{"role": "user", "content": "x"}], "template": {"a": ""}}, "not both"),
    ],
)
def test_what_is_no_template_is_refused(both: Running, fields: dict[str, Any], message: str) -> None:
    images = {} if "messages" in fields else {"images": [picture()]}
    reply = both.post("/generate", {"model": "glmocr", **images, **fields})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert message in error["message"]
    assert error["param"] in ("template", "messages")
