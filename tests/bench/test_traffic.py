"""Traffic against a real server and a real engine: every client's answer is counted, and what goes wrong is said."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from kaminari_core.cli import program
from kaminari_core.errors import UsageError
from kaminari_core.progress import silent
from kaminari_core.registry import Registry
from kaminari_core.testing import EchoModel
from kaminari_core.traffic.clients import Answer, ServerClient, ServerError, events
from kaminari_core.traffic.drive import drive, levels, percentile, summary, table
from kaminari_core.traffic.engine_client import EngineClient
from tests.http.serving import Running, open_engine, running

TEXT = "abcdefghij"
"""The echo model says it back, a byte per token, behind the number of the question and a space."""


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(open_engine(EchoModel), api_keys=("secret",)) as server:
        yield server


def test_each_client_asks_its_share_and_tokens_are_those_of_the_usage(server: Running) -> None:
    client = ServerClient(server.url, TEXT, 8, key="secret")
    assert client.model == "echo"
    found = drive(client, clients=3, requests=5)
    assert (found.clients, found.requests) == (3, 5)
    before = server.engine.stats().generated_tokens
    answer = client.ask(1)
    assert answer.tokens == server.engine.stats().generated_tokens - before == 8
    assert len(answer.times) <= 8
    assert answer.asked < answer.times[0] <= answer.times[-1] <= answer.ended


def test_the_command_writes_what_clients_saw_and_not_the_key(
    server: Running, registry: Registry, tmp_path: Path
) -> None:
    out = tmp_path / "levels.json"
    options = [
        "--url",
        f"{server.url}/v1",
        "--api-key",
        "secret",
        "--rows",
        "1,2",
        "--rounds",
        "1",
        "--new-tokens",
        "4",
    ]
    done = CliRunner().invoke(program(registry), ["bench", *options, "--prompt", TEXT, "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "| 2 | 4 |" in done.output
    written = json.loads(out.read_text(encoding="utf-8"))
    assert [level["clients"] for level in written["levels"]] == [1, 2]
    assert written["server"]["model"] == "echo"
    assert "secret" not in out.read_text(encoding="utf-8")


def test_an_engine_is_driven_like_a_server(server: Running) -> None:
    client = EngineClient(server.engine, TEXT, 6)
    [one, two] = levels(client, [1, 2], 2, 1, silent)
    assert (one.requests, two.requests) == (2, 4)
    assert client.ask(0).tokens == 6
    assert one.tokens_per_s > 0
    assert table([one, two]).count("\n") == 3


@pytest.mark.parametrize(
    ("key", "model", "said"),
    [("wrong", "echo", "401"), ("secret", "other", "404")],
)
def test_a_refusal_is_passed_on(server: Running, key: str, model: str, said: str) -> None:
    with pytest.raises(ServerError, match=said):
        ServerClient(server.url, TEXT, 4, key=key, model=model).ask(0)


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(ServerError, match=r"127\.0\.0\.1:9 does not answer"):
        ServerClient("http://127.0.0.1:9", TEXT, 4)
    with pytest.raises(UsageError, match="give where the server is"):
        ServerClient("localhost:8000", TEXT, 4)


@pytest.mark.parametrize("body", ["{", "[]"])
def test_fields_that_are_no_object_are_refused(registry: Registry, body: str) -> None:
    done = CliRunner().invoke(program(registry), ["bench", "--url", "http://127.0.0.1:9", "--body", body])
    assert (done.exit_code, "--body" in done.output) == (2, True)


def test_an_event_stream_is_read_to_its_end() -> None:
    lines = [
        b": ping\n",
        b'data: {"a": 1}\n',
        b"\n",
        b"event: x\n",
        b'data:{"a": 2}\n',
        b"data: [DONE]\n",
        b"data: no\n",
    ]
    assert list(events(iter(lines))) == [{"a": 1}, {"a": 2}]


def test_percentiles_are_of_nearest_rank() -> None:
    values = list(range(1, 101))
    assert (percentile(values, 0.99), percentile(values, 0.5), percentile([7.0], 0.99)) == (99, 50, 7)
    assert percentile([3.0, 1.0, 2.0], 0.99) == 3.0


def test_figures_follow_from_the_times_of_answers() -> None:
    answers = [Answer(0.0, [1.0, 1.5, 2.5], 2.5, 3, 10), Answer(0.0, [2.0], 2.0, 1, 10)]
    found = summary(answers, 2, 2.5)
    assert found.tokens_per_s == pytest.approx(4 / 2.5)
    assert (found.ttft_p50, found.ttft_p99) == (1.5, 2.0)
    assert (found.between_p50, found.between_p99) == (0.75, 1.0)
    assert found.prompt_tokens == 10
