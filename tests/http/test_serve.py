"""`kaminari serve` as a process: its line, its signals, its exit codes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx2
import pytest
from click.testing import CliRunner

from kaminari_core.cli import program
from kaminari_core.registry import load_registry
from tests.http.serving import PLUGIN, chat_body

ROOT = Path(__file__).parents[2]
PROGRAM = """
from importlib.metadata import EntryPoint
from kaminari_core.cli import program
from kaminari_core.registry import load_registry
names = [("core", "kaminari_core.builtin"), ("http", "kaminari_http.plugin"), ("echo", "tests.http.echo_plugin")]
program(load_registry([EntryPoint(*name, "kaminari") for name in names]))()
"""


@contextmanager
def serve(folder: Path, model: str, *options: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and its address; it may still be loading."""
    (folder / "config.json").write_text(json.dumps({"model_type": model}))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    models = [] if "--model" in options else ["--model", str(folder)]
    command = [sys.executable, "-c", PROGRAM, "serve", *models, "--port", str(port), *options]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("KAMINARI_")}
    variables = {**inherited, "OMP_NUM_THREADS": "1", **environment}
    process = subprocess.Popen(
        command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process, f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.communicate()


def health(url: str) -> int:
    """The status of /health, 0 while nobody answers."""
    try:
        return httpx2.get(f"{url}/health", timeout=5).status_code
    except httpx2.TransportError:
        return 0


def wait_for_health(url: str, status: int) -> None:
    deadline = time.monotonic() + 60
    while health(url) != status:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_serves_until_it_is_told_to_stop(tmp_path: Path) -> None:
    options = (
        "--served-model-name",
        "parrot",
        "--slots",
        "2",
        "--max-length",
        "300",
        "--no-compile",
        "--dtype",
        "float32",
    )
    with serve(tmp_path, "echo", *options, KAMINARI_API_KEY="one two") as (process, url), ThreadPoolExecutor() as pool:
        wait_for_health(url, 200)
        assert process.stdout is not None
        assert process.stdout.readline() == f"kaminari serves parrot at {url}\n"
        assert httpx2.get(f"{url}/v1/models").status_code == 401
        headers = {"Authorization": "Bearer two", "X-Request-Id": "last-one"}
        assert httpx2.get(f"{url}/v1/models", headers=headers).json()["data"][0]["id"] == "parrot"
        body = chat_body("x" * 200, model="parrot", stream=True)
        running = pool.submit(httpx2.post, f"{url}/v1/chat/completions", json=body, headers=headers, timeout=30)
        while 'requests_running{model="parrot"} 1.0' not in httpx2.get(f"{url}/metrics", headers=headers).text:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        # The second of decoding that is left is waited for.
        assert running.result().text.endswith("data: [DONE]\n\n")
        out, log = process.communicate(timeout=20)
        assert (process.returncode, out) == (0, "")
        assert "last-one POST '/v1/chat/completions' 200" in log
        assert "Traceback" not in log


def test_two_models_have_an_engine_each(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
        (folder / "config.json").write_text('{"model_type": "echo"}')
    pairs = zip(folders, ("left", "right"), strict=True)
    options = [word for folder, name in pairs for word in ("--model", str(folder), "--served-model-name", name)]
    with serve(tmp_path, "echo", *options, "--in-process", "--no-compile", "--slots", "1") as (process, url):
        wait_for_health(url, 200)
        assert process.stdout is not None
        assert process.stdout.readline() == f"kaminari serves left, right at {url}\n"
        assert [card["id"] for card in httpx2.get(f"{url}/v1/models").json()["data"]] == ["left", "right"]
        for name in ("left", "right", "right"):
            reply = httpx2.post(
                f"{url}/v1/chat/completions", json=chat_body(f"to {name}", model=name), timeout=30
            ).json()
            assert (reply["model"], reply["choices"][0]["message"]["content"]) == (name, f"to {name}")
        metrics = httpx2.get(f"{url}/metrics").text
        assert 'kaminari_requests_total{finish="stop",model="left"} 1.0' in metrics
        assert 'kaminari_requests_total{finish="stop",model="right"} 2.0' in metrics
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    options = ("--max-length", "45000", "--no-compile", "--drain-seconds", "60")
    with serve(tmp_path, "echo", *options) as (process, url), ThreadPoolExecutor() as pool:
        wait_for_health(url, 200)
        body = chat_body("x" * 40_000, max_tokens=40_000)
        running = pool.submit(httpx2.post, f"{url}/v1/chat/completions", json=body, timeout=30)
        while 'requests_running{model="echo"} 1.0' not in httpx2.get(f"{url}/metrics").text:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        wait_for_health(url, 503)
        process.send_signal(signal.SIGTERM)
        assert running.result().status_code == 503
        process.communicate(timeout=30)
        assert process.returncode == 0


def test_outlives_its_engines_process(tmp_path: Path) -> None:
    with (
        serve(tmp_path, "echo", "--no-compile", "--max-length", "45000") as (process, url),
        ThreadPoolExecutor() as pool,
    ):
        wait_for_health(url, 200)

        def ask(text: str, **fields: object) -> httpx2.Response:
            return httpx2.post(f"{url}/v1/chat/completions", json=chat_body(text, **fields), timeout=60)

        # Long enough not to be over before the process is found and killed, on any machine.
        running = pool.submit(ask, "x" * 40_000, max_tokens=40_000, stream=True)
        while 'requests_running{model="echo"} 1.0' not in httpx2.get(f"{url}/metrics").text:
            time.sleep(0.01)
        children = Path(f"/proc/{process.pid}/task").glob("*/children")
        named = [pid for file in children for pid in file.read_text().split()]
        [engine] = [pid for pid in named if "resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_text()]
        os.kill(int(engine), signal.SIGKILL)
        assert "SIGKILL" in running.result().text.splitlines()[-2]
        assert httpx2.get(f"{url}/metrics").status_code == 200, "what cannot be served can still be counted"
        assert ask("hello").json()["choices"][0]["message"]["content"] == "hello", "it waits for the new process"
        assert health(url) == 200


@pytest.mark.parametrize("options", [["--in-process"], []], ids=["in process", "supervised"])
def test_exit_on_failure(tmp_path: Path, options: list[str]) -> None:
    with serve(tmp_path, "broken", "--no-compile", "--exit-on-failure", *options) as (process, url):
        wait_for_health(url, 200)
        statuses = []
        while process.poll() is None and len(statuses) < 50:
            with suppress(httpx2.TransportError):
                statuses.append(httpx2.post(f"{url}/generate", json={"prompt": "hi"}, timeout=30).status_code)
        _, log = process.communicate(timeout=20)
    assert statuses[0] == 500
    assert set(statuses) <= {500, 503}
    assert process.returncode == 1
    assert "Error: the engine of 'broken' failed: " in log
    assert "no kernel image" in log


def test_drain_has_a_limit(tmp_path: Path) -> None:
    options = ("--in-process", "--max-length", "45000", "--no-compile", "--drain-seconds", "0.2")
    with serve(tmp_path, "echo", *options) as (process, url), ThreadPoolExecutor() as pool:
        wait_for_health(url, 200)
        body = chat_body("x" * 40_000, max_tokens=40_000)
        running = pool.submit(httpx2.post, f"{url}/v1/chat/completions", json=body, timeout=30)
        while 'requests_running{model="echo"} 1.0' not in httpx2.get(f"{url}/metrics").text:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        assert running.result().status_code == 503
        process.communicate(timeout=20)
        assert process.returncode == 0


def test_answers_and_stops_while_it_loads(tmp_path: Path) -> None:
    with serve(tmp_path, "endless") as (process, url):
        wait_for_health(url, 503)
        process.send_signal(signal.SIGTERM)
        out, log = process.communicate(timeout=20)
        assert (process.returncode, out) == (0, "")
        assert "Traceback" not in log


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--api-key", ""], "--api-key"),
        (["--model", "two", "--checkpoint", "x"], "2 --model and 1 --checkpoint"),
        (["--served-model-name", "a", "--served-model-name", "b"], "1 --model and 2 --served-model-name"),
        (["--model", "echo"], "two models would be served as 'echo'"),
        (["--port", "{taken}"], "cannot listen on 127.0.0.1:"),
        (["--host", "999.1.1.1"], "cannot listen on 999.1.1.1:"),
        (["--slots", "0"], "slots is 0"),
        (["--max-body", "0"], "0 is not in the range"),
        (["--drain-seconds", "nan"], "'nan' is not a number"),
    ],
)
def test_options_that_cannot_be_used(options: list[str], message: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        filled = [option.format(taken=taken.getsockname()[1]) for option in options]
        result = CliRunner().invoke(program(load_registry([PLUGIN])), ["serve", "--model", "echo", *filled])
    assert result.exit_code == 2
    assert message in result.output
