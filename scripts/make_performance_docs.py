"""Writes the tables of docs/performance.md from the JSON in benchmarks/results/, so that no figure is copied by hand.

Usage: python scripts/make_performance_docs.py

The document has a pair of markers per file, `<!-- results:NAME -->` and `<!-- /results -->`; what is between them is replaced.
Beside the table of a ladder stands its plot, `docs/NAME.svg`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kaminari_core.ladder.climb import table

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "benchmarks" / "results"
SECTION = re.compile(r"(<!-- results:(?P<name>[\w.-]+) -->\n).*?(<!-- /results -->)", re.DOTALL)


def rendered(document: str) -> str:
    """The document with every section written anew; a section without a result says so."""

    def replaced(match: re.Match[str]) -> str:
        file = RESULTS / f"{match['name']}.json"
        if not file.exists():
            return f"{match[1]}\nNot measured yet.\n\n{match[3]}"
        result = json.loads(file.read_text(encoding="utf-8"))
        plotted = f"![{match['name']}]({match['name']}.svg)\n\n" if "rungs" in result else ""
        return f"{match[1]}\n{plotted}{section(result)}\n\n{match[3]}"

    return SECTION.sub(replaced, document)


def section(result: dict[str, Any]) -> str:
    """The table of a result and where it comes from."""
    kind = next(kind for key, kind in KINDS.items() if key in result)
    return f"{kind(result)}\n\n{_provenance(result)}"


def plot(ladder: dict[str, Any], target: Path) -> None:
    """Draw the tokens per second of a ladder's rungs; the same picture for the same figures, byte for byte."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    names = [one["name"] for one in reversed(ladder["rungs"])]
    speeds = [one["tokens_per_s"] for one in reversed(ladder["rungs"])]
    with mpl.rc_context({"svg.hashsalt": "kaminari", "svg.fonttype": "none"}):
        figure = Figure(figsize=(7, 0.6 + 0.28 * len(names)), layout="constrained")
        axes = figure.add_subplot()
        bars = axes.barh(names, speeds, color=["#888888" if name.startswith("hf-") else "#2b6cb0" for name in names])
        axes.bar_label(bars, [f"{speed:.1f}" for speed in speeds], padding=3, fontsize=8)
        axes.set_xlabel("tokens per second of all rows")
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.12)
        figure.savefig(target, format="svg", metadata={"Date": None})


def _ladder(result: dict[str, Any]) -> str:
    pages = result["pages"]
    settings = result["settings"]
    asked = "torch asks for them" if pages["torch_asks"] else "torch does not ask for them"
    return (
        f"{table(result)}\n\nA prompt of {settings['prompt_tokens']} tokens, {settings['new_tokens']} generated, medians of "
        f"{settings['rounds']} rounds. Memory was read at {result['read_bandwidth'] / 1e9:.1f} GB/s in the same run; a position "
        f"of a row's cache takes {result['kv_bytes_per_position'] / 1e3:.0f} kB. Transparent huge pages are on "
        f"`{pages['transparent_huge_pages']}`, and {asked}; own operators ask by themselves."
    )


def _beside_llamacpp(result: dict[str, Any]) -> str:
    lines = []
    for one in result["beside_llamacpp"]:
        memory = one["memory"]
        lines.append(
            f"| {one['contender']} | {one['tokens_per_s']:.2f} | {one['ratio']:.2f} | {one['ttft'] * 1000:.0f} "
            f"| {memory['resident'] / 1e9:.2f} | {memory['huge'] / memory['resident']:.0%} | {one['spread']:.0%} |"
        )
    heads = ["contender", "tokens/s", "x Q4_0", "TTFT ms", "resident GB", "in huge pages", "spread"]
    commands = "\n".join(one["command"] for one in result["beside_llamacpp"])
    first = {one["contender"]: one["begins_with"] for one in result["beside_llamacpp"]}
    alike = first.get("kaminari bf16", [])
    same = "the same" if alike and alike == first.get("llama.cpp BF16") else "not the same"
    words = f"In bfloat16 both sides begin their replies with {same} {len(alike)} tokens."
    return f"{_table(heads, lines)}\n\n{words} Each contender is a process:\n\n```\n{commands}\n```"


def _levels(result: dict[str, Any]) -> str:
    lines = []
    for name, levels in result["traffic"].items():
        for one in levels:
            between = ["" if one[key] is None else f"{one[key] * 1000:.0f}" for key in ("between_p50", "between_p99")]
            lines.append(
                f"| {name} | {one['clients']} | {one['tokens_per_s']:.1f} | {one['ttft_p50'] * 1000:.0f} "
                f"| {one['ttft_p99'] * 1000:.0f} | {between[0]} | {between[1]} |"
            )
    heads = ["", "clients", "tokens/s", "TTFT p50 ms", "TTFT p99 ms", "between tokens p50 ms", "p99 ms"]
    return _table(heads, lines)


def _compile(result: dict[str, Any]) -> str:
    parts = [
        f"| {one['name']} | {one['eager_ms']:.1f} | {one['compiled_ms']:.1f} | {one['cold']:.1f} | {one['warm']:.1f} "
        + (f"| {one['pays_cold']} pictures, {one['pays_warm']} warm |" if one["wins"] else "| never: it stays eager |")
        for one in result["parts"]
    ]
    starts = [
        f"| {one['start']} | {one['compiled']} | {one['found']} | {one['load_seconds']:.1f} | {one['graph_seconds']:.1f} |"
        for one in result["starts"]
    ]
    vision = _table(["part of the vision tower", "eager ms", "compiled ms", "cold s", "warm s", "pays after"], parts)
    return f"{vision}\n\n{_table(['start', 'compiled', 'found', 'load s', 'graphs s'], starts)}"


def _bench(result: dict[str, Any]) -> str:
    lines = []
    for one in result["results"]:
        accepted = "" if one["acceptance"] is None else f"{one['acceptance']:.0%}"
        lines.append(
            f"| {one['contender']} | {one['rows']} | {one['tokens_per_s']:.2f} | {one['ratio']:.2f} "
            f"| {one['ttft'] * 1000:.0f} | {one['spread']:.0%} | {accepted} |"
        )
    return _table(["contender", "rows", "tokens/s", "ratio", "TTFT ms", "spread", "drafts accepted"], lines)


def _length_buckets(result: dict[str, Any]) -> str:
    ratios = result["ratio_to_short_cache"]
    lines = [f"| {name} | {value:.2f} | {ratios[name]:.2f} |" for name, value in result["ms_per_token"].items()]
    return _table([f"{result['settings']['live']} live tokens in a", "ms/token", "ratio"], lines)


def _load(result: dict[str, Any]) -> str:
    size, peak = result["checkpoint_bytes"] / 1e9, result["peak_resident"] / 1e9
    heads = ["checkpoint GB", "shards", "peak memory of the process GB", "ratio"]
    return _table(heads, [f"| {size:.2f} | {result['shards']} | {peak:.2f} | {result['ratio']:.2f} |"])


def _schedulers(result: dict[str, Any]) -> str:
    gaps = [
        f"| {name} | {one['p50']:.0f} | {one['p99']:.0f} | {one['max']:.0f} | {one['ttft']:.0f} |"
        for name, one in result["gaps_ms"].items()
    ]
    served = [
        f"| {name} | {one['tokens_per_s']:.0f} | {one['latency']:.0f} | {one['inter_token']:.1f} |"
        for name, one in result["served"].items()
    ]
    long = _table(["prompt", "between tokens p50 ms", "p99 ms", "longest ms", "TTFT of the prompt ms"], gaps)
    return f"{long}\n\n{_table(['scheduler', 'tokens/s', 'latency ms', 'between tokens ms'], served)}"


def _supervision(result: dict[str, Any]) -> str:
    lines = [
        f"| {name} | {speed:.1f} | {result['processor_ms_per_step'][name]:.2f} |"
        for name, speed in result["tokens_per_s"].items()
    ]
    settings, rounds = result["settings"], result["ratio_of_rounds"]
    words = (
        f"{settings['rows']} rows of {settings['tokens']} tokens, steps of {result['step_ms']:.1f} ms. Supervised reaches "
        f"{result['ratio']:.3f} of the speed in process, the median of {len(rounds)} rounds from {min(rounds):.3f} to "
        f"{max(rounds):.3f}; by processor time {result['processor_ratio']:.3f}."
    )
    return f"{_table(['engine', 'tokens/s', 'processor ms per step'], lines)}\n\n{words}"


def _table(heads: list[str], lines: list[str]) -> str:
    return "\n".join([f"| {' | '.join(heads)} |", "| " + " | ".join("---" for _ in heads) + " |", *lines])


def _provenance(result: dict[str, Any]) -> str:
    machine, versions = result["machine"], result["versions"]
    cores = f"{machine['processor']}, {machine['cores']} cores, {machine['threads']} threads"
    packages = f"torch {versions['torch']}, transformers {versions['transformers']}"
    return f"`{result['command']}`\n\n{cores}, load {machine['load']:.1f} at the end; {packages}."


KINDS: dict[str, Callable[[dict[str, Any]], str]] = {
    "rungs": _ladder,
    "beside_llamacpp": _beside_llamacpp,
    "traffic": _levels,
    "starts": _compile,
    "ratio_to_short_cache": _length_buckets,
    "peak_resident": _load,
    "gaps_ms": _schedulers,
    "processor_ratio": _supervision,
    "results": _bench,
}
"""Which table a result is, by a key that only its kind has."""


def main() -> None:
    """Update the document in place, and the plots beside it."""
    for name in re.findall(SECTION, DOCUMENT.read_text(encoding="utf-8")):
        file = RESULTS / f"{name[1]}.json"
        if file.exists() and "rungs" in (result := json.loads(file.read_text(encoding="utf-8"))):
            plot(result, DOCUMENT.with_name(f"{name[1]}.svg"))
    DOCUMENT.write_text(rendered(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
