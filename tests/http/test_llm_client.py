"""A second client of the API: the program `llm`, which speaks to servers like this one by its own configuration file."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from kaminari_core.testing import TinyModel
from tests.http.echo_plugin import SlowEcho
from tests.http.serving import Running, Start, picture


class Client:
    """`llm` with a folder of settings of its own."""

    def __init__(self, folder: Path, server: Running, model: str, **facts: Any) -> None:
        self._folder, self._model = folder, model
        entry = {"model_id": model, "model_name": model, "api_base": f"{server.url}/v1", "api_key_name": "own", **facts}
        (folder / "extra-openai-models.yaml").write_text(json.dumps([entry]))
        (folder / "keys.json").write_text(json.dumps({"own": "sesame"}))

    def ask(self, *arguments: str, status: int = 0) -> str:
        variables = {**os.environ, "LLM_USER_PATH": str(self._folder), "NO_PROXY": "*"}
        command = [str(Path(sys.executable).parent / "llm"), "-m", self._model, "--no-log", *arguments]
        done = subprocess.run(command, env=variables, stdin=subprocess.DEVNULL, capture_output=True, timeout=90)
        assert done.returncode == status, done.stderr
        return (done.stderr if status else done.stdout).decode()


def test_text(start: Start, tmp_path: Path) -> None:
    client = Client(tmp_path, start(SlowEcho, app={"api_keys": ("sesame",)}), "echo")
    text = "Fa\u00e7ade \u6f22\u5b57, and a second line\nends."
    assert client.ask(text) == text + "\n"
    assert (
        client.ask("--no-stream", "-s", "be brief", "-o", "max_tokens", "5", "-o", "temperature", "0", text)
        == "Fa\u00e7a\n"
    )
    assert "the prompt has 601 tokens" in client.ask("x" * 600, status=1)


def test_the_older_completions(start: Start, tmp_path: Path) -> None:
    client = Client(tmp_path, start(SlowEcho, app={"api_keys": ("sesame",)}), "echo", completion=True)
    assert client.ask("hello") == "hello\n"


def test_picture(start: Start, tmp_path: Path) -> None:
    server = start(TinyModel, app={"api_keys": ("sesame",)})
    url = picture("navy", (96, 64))
    (tmp_path / "navy.png").write_bytes(base64.b64decode(url.partition(",")[2]))
    client = Client(tmp_path, server, "echo", vision=True)
    said = client.ask("-a", str(tmp_path / "navy.png"), "-o", "max_tokens", "8", "read")
    message = [{"type": "text", "text": "read"}, {"type": "image_url", "image_url": {"url": url}}]
    body = {"model": "echo", "messages": [{"role": "user", "content": message}], "max_tokens": 8}
    reply = server.post("/v1/chat/completions", body, headers={"Authorization": "Bearer sesame"}).json()
    assert said == reply["choices"][0]["message"]["content"] + "\n"
