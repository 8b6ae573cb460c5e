"""Task phrases and the templates that some of them take."""

from __future__ import annotations

from typing import Any

import pytest

from kaminari_core.errors import RequestError
from kaminari_core.tasks import fill

PHRASE = "Fill in:\n{template}"


def test_a_template_is_written_with_an_indentation_of_four() -> None:
    assert (
        fill("extract", PHRASE, {"a": "", "b": {"c": ""}})
        == 'Fill in:\n{\n    "a": "",\n    "b": {\n        "c": ""\n    }\n}'
    )
    assert fill("extract", PHRASE, {"\u59d3\u540d": ""}) == 'Fill in:\n{\n    "\u59d3\u540d": ""\n}'
    assert fill("extract", PHRASE, {"items": [{"price": ""}], "names": []}).count('""') == 1


def test_a_template_may_spell_the_place_of_the_template() -> None:
    assert fill("extract", PHRASE, {"{template}": ""}) == 'Fill in:\n{\n    "{template}": ""\n}'


def test_a_task_without_a_place_is_its_phrase() -> None:
    assert fill("ocr", "Read {this}.") == "Read {this}."


@pytest.mark.parametrize(
    ("phrase", "template", "message"),
    [
        (PHRASE, None, "needs a JSON template"),
        ("Read.", {"a": ""}, "takes no template"),
        (PHRASE, {}, r"must be a JSON object with fields, but is \{\}"),
        (PHRASE, [""], r"must be a JSON object with fields, but is \[\"\"\]"),
        (PHRASE, "a", "must be a JSON object"),
        (PHRASE, {"a": "total"}, r'template\.a is "total", but a template'),
        (PHRASE, {"a": {"b": [{"c": 1}]}}, r"template\.a\.b\[0\]\.c is 1"),
        (PHRASE, {"a": None}, r"template\.a is null"),
        (PHRASE, {"type": "object", "properties": {"a": {"type": "string"}}}, "no JSON Schema"),
    ],
)
def test_what_is_no_template_is_refused(phrase: str, template: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        fill("extract", phrase, template)
    assert caught.value.param == "template"
