"""What a reply is held to: a frozen value inside a request, made from what people have at hand. No grammar library here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kaminari_core.errors import RequestError
from kaminari_core.structured.template import schema_of_template

Kind = Literal["json_schema", "regex", "choice"]
CODE = "invalid_structure"
"""The `code` of every RequestError about a structure."""


@dataclass(frozen=True, slots=True)
class Structure:
    """The shape that the text of a reply must have, from its first to its last character.

    `text` is the JSON of a schema, a regular expression, or the JSON of a list of strings, by `kind`. `name` is what errors call
    it in the sender's terms, such as `response_format`. The class methods make one; whether a grammar can be made of it is
    found when the request is prepared.
    """

    kind: Kind
    text: str
    name: str = "structure"

    @classmethod
    def json_schema(cls, schema: Any, name: str = "structure") -> Structure:
        """A JSON document that is valid under a schema: a mapping, the text of one, or a Pydantic model or TypeAdapter.

        Raises RequestError for anything else.
        """
        if isinstance(schema, str):
            schema = _read(schema, name)
        for method in ("model_json_schema", "json_schema"):
            if callable(make := getattr(schema, method, None)):
                schema = make()
        if not isinstance(schema, Mapping):
            raise _unusable(name, "a JSON schema must be an object", schema)
        return cls("json_schema", _write(dict(schema), name), name)

    @classmethod
    def json_object(cls, name: str = "structure") -> Structure:
        """Any JSON object."""
        return cls.json_schema({"type": "object"}, name)

    @classmethod
    def template(cls, template: Any, name: str = "template") -> Structure:
        """JSON of the shape of a template, as the task `extract` takes it: the same fields and no others, in this order."""
        return cls.json_schema(schema_of_template(template), name)

    @classmethod
    def regex(cls, pattern: str, name: str = "regex") -> Structure:
        r"""Text that a regular expression matches as a whole.

        The syntax is that of Rust's regex crate: no look-around and no back-references. `.` matches all but a line feed,
        `\d` the ten ASCII digits. Raises RequestError for a pattern that ends in a lone backslash.
        """
        if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
            raise _unusable(name, "a regular expression must not end in a lone backslash", pattern)
        return cls("regex", pattern, name)

    @classmethod
    def choice(cls, choices: Any, name: str = "choice") -> Structure:
        """One of these strings. Raises RequestError where there is none, or where one is empty."""
        given = list(choices) if isinstance(choices, Sequence) and not isinstance(choices, str) else []
        if not given or not all(isinstance(each, str) and each for each in given):
            raise _unusable(name, "choices must be a list of strings that are not empty", choices)
        return cls("choice", _write(given, name), name)


def _read(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{name}: the schema is no JSON: {error}", param=name, code=CODE) from error


def _write(value: Any, name: str) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{name} cannot be written as JSON: {error}", param=name, code=CODE) from error
    return text


def _unusable(name: str, rule: str, value: Any) -> RequestError:
    shown = repr(value)
    return RequestError(
        f"{name}: {rule}, but is {shown if len(shown) <= 60 else shown[:60] + '...'}", param=name, code=CODE
    )
