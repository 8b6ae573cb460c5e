"""`/metrics`: parsed by the client library's own parser, exactly the names that docs/http.md lists, right numbers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from kaminari_core.registry import load_registry
from kaminari_core.testing import EchoModel
from tests.http.serving import PLUGIN, Running, Start, chat_body

DOCUMENT = Path(__file__).parents[2] / "docs" / "http.md"


def families(server: Running) -> dict[str, Any]:
    reply = server.http.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {family.name: family for family in text_string_to_metric_families(reply.text)}


def value(server: Running, name: str, **labels: str) -> float:
    for family in families(server).values():
        for sample in family.samples:
            if sample.name == name and sample.labels == {"model": "echo", **labels}:
                return float(sample.value)
    raise AssertionError(f"no sample {name} {labels}")


def test_numbers(start: Start) -> None:
    server = start(EchoModel, slots=3)
    server.chat("hello")
    server.chat("hello", stream=True, max_tokens=3)
    server.chat("x" * 600)
    server.chat("hi", logit_bias={"99999": 1})
    assert value(server, "kaminari_requests_total", finish="stop") == 1
    assert value(server, "kaminari_requests_total", finish="length") == 1
    assert value(server, "kaminari_requests_total", finish="refused") == 2
    assert value(server, "kaminari_prompt_tokens_total") == 12
    assert value(server, "kaminari_generated_tokens_total") == 6 + 3
    for name in ("time_to_first_token", "request", "queue", "window", "prepare", "prefill"):
        assert value(server, f"kaminari_{name}_seconds_count") == 2, name
        assert value(server, f"kaminari_{name}_seconds_sum") >= 0
    assert value(server, "kaminari_slots") == 3
    assert value(server, "kaminari_engine_ready") == 1
    assert value(server, "kaminari_engine_restarts_total") == 0
    assert value(server, "kaminari_slots_busy") == 0
    assert value(server, "kaminari_requests_running") == 0
    assert value(server, "kaminari_requests_waiting") == 0
    # Between the tokens: 4 gaps of the first reply's five letters, 2 of the second's three.
    assert value(server, "kaminari_inter_token_seconds_count") == 6


def test_guessed_tokens(start: Start) -> None:
    server = start(EchoModel, draft="prompt-lookup", draft_auto=False)
    server.chat("abcabcabcabcabc")
    drafts = server.post("/generate", {"prompt": "abcabcabcabcabc"}).json()["metrics"]
    assert drafts["drafts_proposed"] >= drafts["drafts_accepted"] > 0
    assert value(server, "kaminari_drafts_proposed_total") == 2 * drafts["drafts_proposed"]
    assert value(server, "kaminari_drafts_accepted_total") == 2 * drafts["drafts_accepted"]


def test_names_are_the_documented_ones(echo: Running) -> None:
    echo.chat("hello")
    samples = {sample.name for family in families(echo).values() for sample in family.samples}
    names = {re.sub(r"_(bucket|sum|count)$", "", name) for name in samples}
    documented = set(re.findall(r"^\| `(kaminari_\w+)` \|", DOCUMENT.read_text(), re.MULTILINE))
    assert names == documented
    labels = {label for family in families(echo).values() for sample in family.samples for label in sample.labels}
    assert labels == {"model", "finish", "le"}


def test_the_dashboard_asks_for_what_there_is(echo: Running) -> None:
    board = json.loads((DOCUMENT.parent / "grafana.json").read_text())
    echo.chat("hello")
    found = families(echo).values()
    samples = {sample.name for family in found for sample in family.samples}
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    queries = [variable["definition"] for variable in board["templating"]["list"] if variable["type"] == "query"]
    named = {name for text in [*asked, *queries] for name in re.findall(r"kaminari_\w+", text)}
    assert named - samples == set()
    # Every metric has its place on the board.
    shown = {re.sub(r"_(bucket|sum|count|total)$", "", name) for name in named}
    assert {family.name for family in found} == shown
    for expression in asked:
        assert expression.count("(") == expression.count(")")
        assert set(re.findall(r"by \(([^)]*)\)", expression)) <= {"model", "model, finish", "le, model"}
    places = [tuple(panel["gridPos"].values()) for panel in board["panels"]]
    assert len(set(places)) == len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_every_route_is_documented(echo: Running) -> None:
    text = DOCUMENT.read_text()
    for route in load_registry([PLUGIN]).routes({"echo": echo.engine}):
        for method in route.methods - {"HEAD"}:
            assert f"`{method} {route.path}`" in text


def test_two_apps_count_for_themselves(echo: Running, start: Start) -> None:
    other = start(EchoModel)
    other.post("/v1/chat/completions", chat_body("a"))
    assert value(other, "kaminari_requests_total", finish="stop") == 1
