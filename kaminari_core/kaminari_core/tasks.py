"""A model's named tasks: prompt phrases that it was trained on, which may have a place for a JSON template of the user's.

Such a template is an example of the answer with nothing filled in: an object whose values are empty strings, or objects and lists
of such. It is no JSON Schema; anything that is not empty is refused, because a model would take it for what it should say.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from kaminari_core.errors import RequestError
from kaminari_core.flow import ImagePart, Request, TextPart

FIELD = "{template}"
"""Where a task's phrase takes a template."""
READING: Final = frozenset({"ocr", "markdown", "table", "formula", "extract"})
"""The tasks that say what stands in a picture, by the names that models give them."""


def fill(task: str, phrase: str, template: Any = None) -> str:
    """The prompt of a task: its phrase, with `template` (JSON values, None when not given) in its place.

    The template is written with an indentation of four, as in the model cards. Raises RequestError for a template that is
    missing, not wanted, or no template.
    """
    if FIELD not in phrase:
        if template is not None:
            raise RequestError(f"the task {task!r} takes no template; leave it out", param="template")
        return phrase
    if template is None:
        raise RequestError(
            f'the task {task!r} needs a JSON template of the fields to read, such as {{"total": "", "date": ""}}',
            param="template",
        )
    check_template(template)
    return phrase.replace(FIELD, json.dumps(template, ensure_ascii=False, indent=4))


def check_template(template: Any) -> None:
    """Raise RequestError for what is no template."""
    if not isinstance(template, dict) or not template:
        raise RequestError(
            f"the template must be a JSON object with fields, but is {_shown(template)}", param="template"
        )
    _check(template, "template")


def _check(value: Any, place: str) -> None:
    if isinstance(value, dict):
        for name, inner in value.items():
            _check(inner, f"{place}.{name}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            _check(inner, f"{place}[{index}]")
    elif value != "":
        raise RequestError(
            f"{place} is {_shown(value)}, but a template's values are empty strings, or objects and lists of them; it shows the "
            "shape of the answer and is no JSON Schema",
            param="template",
        )


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else text[:40] + "..."


def task_of(request: Request, tasks: Mapping[str, str]) -> str | None:
    """The task that a request names, or whose phrase is all that its last message says; `ocr` for pictures without words.

    `tasks` are the phrases of the model, by name. None for anything else.
    """
    if request.task is not None or not request.messages:
        return request.task
    parts = request.messages[-1].parts
    words = "".join(part.text for part in parts if isinstance(part, TextPart)).strip()
    if not words:
        return "ocr" if "ocr" in tasks and any(isinstance(part, ImagePart) for part in parts) else None
    for name, phrase in tasks.items():
        before, field, _ = phrase.partition(FIELD)
        if words.startswith(before) if field else words == phrase.strip():
            return name
    return None
