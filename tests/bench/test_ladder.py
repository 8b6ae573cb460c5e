"""The ladder: rungs over shared weights, in turns, with what stands beside their speed; on the bundled checkpoint."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import make_performance_docs as performance
from kaminari_core.cache import StaticCache
from kaminari_core.checkpoint import resolve
from kaminari_core.cli import program
from kaminari_core.config import EngineConfig
from kaminari_core.errors import UnknownNameError
from kaminari_core.flow import Embedded, Message, Request, TextPart
from kaminari_core.ladder.accuracy import STEPS, forced_logits, logit_error
from kaminari_core.ladder.bandwidth import ReadBandwidth, held_bytes, step_bytes
from kaminari_core.ladder.climb import Plan, climb, table
from kaminari_core.ladder.contenders import Contenders, share_weights
from kaminari_core.ladder.memory import peak_of
from kaminari_core.ladder.rungs import RUNGS, chosen
from kaminari_core.launch import load_model
from kaminari_core.progress import silent
from kaminari_core.protocols import Model
from kaminari_core.registry import Registry

NAMES = "hf-dynamic,eager,int4-head-aten,rows-2,mtp,int4"
PROMPT, NEW = 40, 6
EAGER = EngineConfig(compile=False, device="cpu", max_length=256)


@pytest.fixture(scope="module")
def report(registry: Registry, packed: Path) -> dict[str, Any]:
    """Two rounds of some rungs, none of which has to be compiled for this."""
    rungs = [
        dataclasses.replace(rung, settings={**rung.settings, "compile": False, "kernels": "aten"})
        if rung.stock is None
        else rung
        for rung in chosen(NAMES)
    ]
    plan = Plan(rungs, PROMPT, NEW, 2, 600.0, memory=False)
    return climb(registry, "qwen3vl", "tiny", EAGER, {"int4-head": packed}, plan, silent)


@pytest.fixture(scope="module")
def model(registry: Registry) -> Model:
    return load_model(registry, *resolve(registry, "qwen3vl", "tiny"), EAGER, silent)[0]


def rung(report: dict[str, Any], name: str) -> dict[str, Any]:
    [found] = [one for one in report["rungs"] if one["name"] == name]
    assert isinstance(found, dict)
    return found


def test_rungs_keep_the_order_of_the_ladder_and_those_that_cannot_run_say_why(report: dict[str, Any]) -> None:
    assert [one["name"] for one in report["rungs"]] == ["hf-dynamic", "eager", "int4-head-aten", "rows-2"]
    assert set(report["refused"]) == {"mtp", "int4"}
    assert "--packed int4=DIR" in report["refused"]["int4"]
    assert "draft head" in report["refused"]["mtp"]
    shown = table(report)
    assert "* `mtp`: " in shown
    assert "| `rows-2`: " in shown


def test_ratios_and_shares_follow_from_the_turns(report: dict[str, Any]) -> None:
    base, two = rung(report, "hf-dynamic"), rung(report, "rows-2")
    for one in report["rungs"]:
        assert len(one["turns"]) == 2
        speeds = sorted(turn["tokens"] / turn["seconds"] for turn in one["turns"])
        assert one["tokens_per_s"] == pytest.approx(sum(speeds) / 2)
        assert one["ratio_dynamic"] == pytest.approx(one["tokens_per_s"] / base["tokens_per_s"])
        assert one["ratio_static"] is None
    assert base["bandwidth_share"] is None
    assert [turn["tokens"] for turn in two["turns"]] == [2 * (NEW - 1)] * 2
    assert [turn["steps"] for turn in two["turns"]] == [NEW - 1] * 2
    assert two["tokens_per_step"] == 2
    seconds = two["ms_per_step"] / 1000
    assert two["bandwidth_share"] == pytest.approx(two["step_bytes"] / seconds / report["read_bandwidth"])


def test_quantized_rungs_have_a_logit_error_and_read_less(report: dict[str, Any]) -> None:
    exact, four = rung(report, "eager"), rung(report, "int4-head-aten")
    assert exact["logits"] == exact["rounding"] == {"relative": 0.0, "agreement": 1.0}
    # The first with these weights: what it is compared with is itself.
    assert four["rounding"]["relative"] == 0.0
    assert 0 < four["logits"]["relative"] < 0.5
    assert four["step_bytes"] < exact["step_bytes"] / 2


def test_the_document_shows_a_report_and_its_plot_is_written_alike_twice(
    report: dict[str, Any], tmp_path: Path
) -> None:
    written = json.loads(json.dumps(report))
    assert "| `int4-head-aten`: " in performance.section(written)
    performance.plot(written, tmp_path / "first.svg")
    performance.plot(written, tmp_path / "second.svg")
    drawn = (tmp_path / "first.svg").read_text(encoding="utf-8")
    assert drawn == (tmp_path / "second.svg").read_text(encoding="utf-8")
    assert "int4-head-aten" in drawn


def test_one_round_is_made_however_little_time_there_is(registry: Registry) -> None:
    plan = Plan(chosen("eager"), 20, 3, 5, 0.0, memory=False)
    found = climb(registry, "qwen3vl", "tiny", EAGER, {}, plan, silent)
    assert len(rung(found, "eager")["turns"]) == 1
    assert found["settings"]["rounds"] == 1


def test_names_of_rungs_are_checked() -> None:
    assert chosen(None) == RUNGS
    assert [one.name for one in chosen("int4, hf-static")] == ["hf-static", "int4"]
    with pytest.raises(UnknownNameError, match="no rung 'int5'"):
        chosen("int5")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--ladder", "--packed", "int4"], "give NAME=DIR"),
        (["--ladder", "--packed", "int4=nowhere"], "nowhere, which is no directory"),
        (["--ladder", "--rungs", "fastest"], "There is no rung 'fastest'"),
        (["--ladder", "--rungs", "hf-dynamic", "--no-memory"], "none was chosen"),
        (["--ladder", "--rungs", "hf-dynamic,int4", "--no-memory"], "no packed directory 'int4'"),
    ],
)
def test_what_cannot_be_used_is_one_clear_line(registry: Registry, options: list[str], said: str) -> None:
    done = CliRunner().invoke(program(registry), ["bench", "--model", "qwen3vl", "--checkpoint", "tiny", *options])
    assert done.exit_code in (1, 2)
    assert said in done.output


def test_bench_wants_a_model_or_a_server(registry: Registry) -> None:
    done = CliRunner().invoke(program(registry), ["bench"])
    assert (done.exit_code, "give --model, or --url" in done.output) == (2, True)


def test_forced_logits_are_those_of_a_prefill_of_the_same_tokens(model: Model) -> None:
    prepared = model.prepare(Request((Message("user", (TextPart("Read the text."),)),)))
    found = forced_logits(model, prepared)
    assert found.shape == (STEPS + 1, model.shape.vocabulary)
    fed = torch.tensor([prepared.tokens[step % prepared.length] for step in range(STEPS)])
    positions = torch.cat([prepared.positions, prepared.next_position + torch.arange(STEPS).expand(3, -1)], dim=1)
    whole = torch.cat([torch.tensor(prepared.tokens), fed])
    hidden = model.network.decoder.embed_tokens(whole).detach()  # type: ignore[attr-defined]
    cache = StaticCache(model.shape, 1, len(whole), model.device, model.dtype)
    for step in (0, 3, STEPS):
        stop = prepared.length + step
        expected = model.prefill(Embedded(hidden[:stop], positions[:, :stop]), 0, stop, cache, 0)
        torch.testing.assert_close(found[step], expected, atol=1e-4, rtol=1e-4)


def test_the_logit_error_is_relative_to_the_size_of_the_logits() -> None:
    exact = torch.tensor([[3.0, 4.0], [1.0, 0.0]])
    ours = torch.tensor([[3.0, 4.0], [0.0, 1.0]])
    found = logit_error(ours, exact)
    assert found.relative == pytest.approx((2 / 26) ** 0.5)
    assert found.agreement == 0.5


def test_a_step_reads_layers_head_and_keys_and_values(registry: Registry, model: Model) -> None:
    shape = model.shape
    text = json.loads((resolve(registry, "qwen3vl", "tiny")[1] / "config.json").read_text(encoding="utf-8"))[
        "text_config"
    ]
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    layer = shape.hidden * (q + 2 * kv) + q * shape.hidden + 3 * shape.hidden * text["intermediate_size"]
    norms = 2 * shape.hidden + 2 * shape.head_dim
    cache = 2 * 100 * kv
    floats = shape.layers * (layer + norms + 3 * cache) + shape.vocabulary * shape.hidden
    assert step_bytes(model, 3, 100) == 4 * floats


def test_bytes_of_shared_storage_count_once() -> None:
    module = torch.nn.Linear(8, 4, bias=False)
    pair = torch.nn.ModuleList([module, torch.nn.Linear(8, 4, bias=False)])
    assert held_bytes(pair) == 2 * 8 * 4 * 4
    pair[1].weight = module.weight  # type: ignore[assignment]
    assert held_bytes(pair) == 8 * 4 * 4


def test_bandwidth_is_bytes_over_seconds() -> None:
    assert 1e8 < ReadBandwidth(torch.device("cpu"), 1 << 22).measure(2) < 1e13


def test_models_share_what_is_equal_and_nothing_else(registry: Registry, model: Model) -> None:
    other = load_model(registry, *resolve(registry, "qwen3vl", "tiny"), EAGER, silent)[0]
    mine, theirs = (dict(each.network.named_parameters()) for each in (other, model))  # type: ignore[attr-defined]
    changed = "decoder.norm.weight"
    with torch.no_grad():
        mine[changed] += 1
    share_weights(other, model)
    shared = {name for name in mine if mine[name].data_ptr() == theirs[name].data_ptr()}
    assert shared == set(mine) - {changed}


@pytest.mark.slow
def test_the_peak_of_a_process_holds_its_weights(registry: Registry) -> None:
    _, folder = resolve(registry, "qwen3vl", "tiny")
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    for stock in (False, True):
        assert peak_of("qwen3vl", folder, EAGER, 20, 1, stock) > weights


def test_rungs_of_equal_settings_read_their_own_weights(registry: Registry, packed: Path) -> None:
    rungs = [
        dataclasses.replace(one, settings={"compile": False, "kernels": "aten"})
        for one in chosen("eager,int4-head-aten")
    ]
    with Contenders(registry, "qwen3vl", "tiny", EAGER, {"int4-head": packed}, silent) as contenders:
        assert contenders.load(rungs) == {}
        full, packed_model = (contenders.engine(one).model for one in rungs)
        assert [full, packed_model] == [contenders.model(one) for one in rungs]
        assert held_bytes(full.network) > held_bytes(packed_model.network)  # type: ignore[attr-defined]
