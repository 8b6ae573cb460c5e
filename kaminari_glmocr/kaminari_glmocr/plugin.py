"""What this package adds to kaminari: one model, as facts and a target that is imported when it is used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from kaminari_core.hookspecs import hookimpl
from kaminari_core.specs import ModelSpec

# The exact phrases of the model card: it was trained on these and answers others with fragments. The last one means "Output the
# information in the picture in the following JSON format".
TASKS: Mapping[str, str] = MappingProxyType(
    {
        "ocr": "Text Recognition:",
        "table": "Table Recognition:",
        "formula": "Formula Recognition:",
        "extract": "\u8bf7\u6309\u4e0b\u5217JSON\u683c\u5f0f\u8f93\u51fa\u56fe\u4e2d\u4fe1\u606f:\n{template}",
    }
)

# Short names of checkpoint folders inside this package.
BUNDLED: Mapping[str, str] = MappingProxyType({"tiny": "kaminari_glmocr:tiny"})


@hookimpl
def kaminari_models() -> Iterable[ModelSpec]:
    """GLM-OCR."""
    return [
        ModelSpec(
            name="glmocr",
            target="kaminari_glmocr.model:load",
            summary="GLM-OCR: text, tables, formulas and fields of documents, with a draft head for --draft mtp",
            model_types=("glm_ocr",),
            bundled=BUNDLED,
            tasks=TASKS,
            reference="kaminari_glmocr.reference:load",
            footprint="kaminari_glmocr.footprint:footprint",
            # The published size, so that the memory plan can be asked about it.
            shapes=MappingProxyType({"glm-ocr": "kaminari_glmocr:shapes/glm-ocr"}),
        )
    ]
