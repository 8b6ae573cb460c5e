"""What a structure can be made of, and what is done to a schema before a grammar is made of it."""

from __future__ import annotations

import json
import pickle
import sys
from typing import Any

import jsonschema
import pytest
from pydantic import BaseModel, TypeAdapter

from kaminari_core.errors import RequestError, UsageError
from kaminari_core.flow import Message, Request, TextPart
from kaminari_core.structured.grammars import check_structure
from kaminari_core.structured.schema import check_enforceable, close_objects
from kaminari_core.structured.structure import Structure
from kaminari_core.structured.template import schema_of_template


class Line(BaseModel):
    """A line of a receipt."""

    name: str
    price: float | None = None


def test_schemas_come_as_values_texts_and_pydantic_models() -> None:
    schema = {"type": "object", "properties": {"ü": {"type": "string"}}}
    assert Structure.json_schema(schema) == Structure.json_schema(json.dumps(schema))
    assert json.loads(Structure.json_schema(Line).text) == Line.model_json_schema()
    assert json.loads(Structure.json_schema(TypeAdapter(list[Line])).text) == TypeAdapter(list[Line]).json_schema()
    assert json.loads(Structure.json_object().text) == {"type": "object"}


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("json_schema", "{", "here: the schema is no JSON"),
        ("json_schema", [1], "here: a JSON schema must be an object, but is [1]"),
        ("json_schema", {"const": float("nan")}, "here cannot be written as JSON"),
        ("json_schema", {"const": b""}, "here cannot be written as JSON"),
        ("json_schema", {"const": "\ud800"}, "here cannot be written as JSON"),
        ("regex", "ab\\", "here: a regular expression must not end in a lone backslash"),
        ("choice", [], "here: choices must be a list of strings that are not empty"),
        ("choice", "abc", "here: choices must be a list of strings that are not empty, but is 'abc'"),
        ("choice", ["a", ""], "here: choices must be"),
    ],
    ids=str,
)
def test_what_is_no_structure_is_refused_by_name(kind: str, value: Any, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        getattr(Structure, kind)(value, "here")
    assert message in str(caught.value)
    assert (caught.value.param, caught.value.code) == ("here", "invalid_structure")


@pytest.mark.parametrize(
    ("structure", "words"),
    [
        (Structure.regex("(", "here"), "unclosed group"),
        (Structure.regex("a(?=b)", "here"), "look-around"),
        (Structure.json_schema({"type": "money"}, "here"), "Invalid type: money"),
        (Structure.json_schema({"type": "array", "uniqueItems": True}, "here"), "uniqueItems"),
        (Structure.json_schema({"$ref": "#/nowhere"}, "here"), "'/nowhere' does not exist"),
        (Structure.json_schema({"type": "string", "minLength": 3, "maxLength": 2}, "here"), "Unsatisfiable"),
    ],
)
def test_what_no_grammar_can_be_made_of_is_refused_in_llguidances_words(structure: Structure, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_structure(structure)
    message = str(caught.value)
    assert message.startswith("here cannot be enforced: ")
    assert words in message
    assert "%llguidance" not in message
    assert (caught.value.param, caught.value.code) == ("here", "invalid_structure")


def test_an_explanation_is_no_page_of_its_own() -> None:
    schema = {"allOf": [{"type": "string", "pattern": f"[{letter}]"} for letter in "abcdefghijklmnop"]}
    with pytest.raises(RequestError) as caught:
        check_structure(Structure.json_schema(schema))
    assert len(str(caught.value)) < 500


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UsageError, match=r"pip install 'kaminari-core\[structured\]'"):
        check_structure(Structure.regex("a"))


def test_a_request_with_a_structure_crosses_process_borders() -> None:
    request = Request((Message("user", (TextPart("x"),)),), structure=Structure.regex("a+"))
    assert pickle.loads(pickle.dumps(request)) == request


def test_a_template_becomes_the_schema_of_its_shape() -> None:
    template = {"shop": "", "lines": [{"name": "", "price": ""}], "notes": [], "pair": ["", {"x": ""}]}
    schema = schema_of_template(template)
    good = {"shop": "S", "lines": [{"name": "a", "price": "1"}] * 2, "notes": ["n"], "pair": ["a", {"x": "b"}, "c"]}
    jsonschema.validate(good, schema)
    assert list(schema["properties"]) == list(template)
    for bad in (
        {**good, "more": ""},
        {name: value for name, value in good.items() if name != "shop"},
        {**good, "shop": 1},
        {**good, "lines": [{"name": "a"}]},
        {**good, "notes": [1]},
        {**good, "pair": [{"x": "b", "y": ""}]},
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(bad, schema)
    with pytest.raises(RequestError, match="is no JSON Schema"):
        schema_of_template({"type": "object"})


def test_objects_that_name_their_properties_are_closed() -> None:
    schema = {
        "$defs": {"line": {"type": "object", "properties": {"n": {}}}},
        "type": "object",
        "properties": {
            "properties": {"type": "array", "items": {"$ref": "#/$defs/line"}},
            "free": {"type": "object"},
            "open": {"properties": {"a": {}}, "additionalProperties": {"type": "string"}},
            "more": {"properties": {"a": {}}, "required": ["b"]},
        },
    }
    before = json.dumps(schema)
    closed = close_objects(schema)
    assert json.dumps(schema) == before
    assert closed["additionalProperties"] is False
    assert closed["$defs"]["line"]["additionalProperties"] is False
    fields = closed["properties"]
    assert "additionalProperties" not in fields["free"]
    assert fields["open"]["additionalProperties"] == {"type": "string"}
    assert fields["more"]["additionalProperties"] is True
    assert list(fields) == ["properties", "free", "open", "more"]


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
        {"properties": {"a": {}}, "anyOf": [{"required": ["a"]}, {"properties": {"b": {}}}]},
        {"properties": {"a": {}}, "$ref": "#/$defs/b", "$defs": {"b": {"properties": {"b": {}}}}},
        {"not": {"properties": {"a": {}}}},
    ],
)
def test_objects_made_of_parts_stay_open(schema: dict[str, Any]) -> None:
    assert close_objects(schema) == schema


@pytest.mark.parametrize(
    ("schema", "enforceable"),
    [
        ({"minProperties": 1}, False),
        ({"minProperties": 1, "required": ["a"]}, True),
        ({"minProperties": 2, "additionalProperties": False, "properties": {"a": {}, "b": {}}}, True),
        ({"minProperties": 2, "additionalProperties": False, "patternProperties": {"^a": {}}}, False),
        ({"properties": {"minProperties": {"const": 3}}}, True),
        ({"items": [{"anyOf": [{"additionalProperties": {"minProperties": 1}}]}]}, True),
        ({"items": {"anyOf": [{"additionalProperties": {"minProperties": 1}}]}}, False),
    ],
)
def test_a_number_of_properties_needs_their_names(schema: dict[str, Any], enforceable: bool) -> None:
    if enforceable:
        check_enforceable(schema, "here")
    else:
        with pytest.raises(RequestError, match="minProperties"):
            check_enforceable(schema, "here")
