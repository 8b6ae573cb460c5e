"""What this package adds to kaminari: one model, as facts and a target that is imported when it is used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from kaminari_core.hookspecs import hookimpl
from kaminari_core.specs import ModelSpec

TASKS: Mapping[str, str] = MappingProxyType(
    {
        "ocr": "Read all the text in the image.",
        "caption": "Describe this image.",
        "markdown": "Convert this page to Markdown.",
    }
)

# Published sizes whose configuration comes along, so that the memory plan can be asked about them.
SIZES = ("2b", "4b", "8b", "32b", "30b-a3b")


@hookimpl
def kaminari_models() -> Iterable[ModelSpec]:
    """Qwen3-VL."""
    return [
        ModelSpec(
            name="qwen3vl",
            target="kaminari_qwen3vl.model:load",
            summary="Qwen3-VL 2B, 4B, 8B, 32B and 30B-A3B: pictures and text in, text out",
            model_types=("qwen3_vl", "qwen3_vl_moe"),
            bundled=MappingProxyType({"tiny": "kaminari_qwen3vl:tiny"}),
            tasks=TASKS,
            reference="kaminari_qwen3vl.reference:load",
            footprint="kaminari_qwen3vl.footprint:footprint",
            shapes=MappingProxyType({size: f"kaminari_qwen3vl:shapes/{size}" for size in SIZES}),
        )
    ]
