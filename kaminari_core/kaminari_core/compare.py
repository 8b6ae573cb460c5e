"""The same pages, the same visual-token budget, one row of figures per model: quality, speed, memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kaminari_core.config import EngineConfig
from kaminari_core.evaluation.report import as_json, provenance
from kaminari_core.evaluation.run import Evaluation
from kaminari_core.evaluation.text_score import TextScore

HEAD = (
    "model", "checkpoint", "pages", "CER", "WER", "exact lines", "visual tokens/page", "tokens/s", "tokens/s of a reply",
    "prefill ms", "s/page", "peak memory MB",
)  # fmt: skip


def table(found: Sequence[Evaluation]) -> str:
    """The figures as a Markdown table."""
    lines = ["| " + " | ".join(HEAD) + " |", "|" + " --- |" * len(HEAD)]
    for evaluation in found:
        text, count = evaluation.quality.text or TextScore(), len(evaluation.pages)
        cells = (
            evaluation.model, evaluation.checkpoint, str(count), f"{text.cer:.2%}", f"{text.wer:.2%}",
            f"{text.exact_lines} of {text.lines} ({text.exact:.0%})", f"{evaluation.visual_tokens:.0f}",
            f"{evaluation.tokens_per_s:.1f}", f"{evaluation.row_tokens_per_s:.1f}", f"{evaluation.prefill * 1000:.0f}",
            f"{evaluation.seconds / count:.2f}", f"{evaluation.memory / 1e6:.0f}",
        )  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def report(found: Sequence[Evaluation], folder: Path, config: EngineConfig) -> dict[str, Any]:
    """Everything needed to read the figures later, with what each model read on each page."""
    return {
        **provenance(folder.name, len(found[0].pages)),
        "visual_tokens": config.visual_tokens,
        "models": [as_json(evaluation) for evaluation in found],
    }
