"""From the many ways to ask for structured output to the one structure of the engine's request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kaminari_core.errors import RequestError
from kaminari_core.structured.structure import Structure
from kaminari_http.wire import GenerateRequest, Options
from kaminari_http.wire_ocr import OcrOptions
from kaminari_http.wire_structured import (
    FlatSchemaFormat,
    ObjectFormat,
    ResponseFormat,
    SchemaFormat,
    StructuredOutputs,
    TextFormat,
)


def structure_of(
    options: Options, format: ResponseFormat | TextFormat | None, field: str = "response_format"
) -> Structure | None:
    """The structure that a request asks for; `format` is its format, which errors call `field`.

    Raises RequestError for what is no structure, and where there are two of them.
    """
    return _only([*_of_format(format, field), *_of_extensions(options)])


def structure_of_generate(asked: GenerateRequest) -> Structure | None:
    """As `structure_of`, where a template may say it too."""
    other = structure_of(asked, asked.response_format)
    return _only([*([] if other is None else [other]), *_of_template(asked.strict, asked.template)])


def structure_of_page(asked: OcrOptions) -> Structure | None:
    """As `structure_of_generate`, for each page of a document."""
    regex = [] if asked.regex is None else [Structure.regex(asked.regex)]
    found = [*_of_format(asked.response_format, "response_format"), *regex]
    return _only([*found, *_of_template(asked.strict, asked.template)])


def _only(found: list[Structure]) -> Structure | None:
    if len(found) > 1:
        raise RequestError(
            f"{found[0].name} and {found[1].name} both say what the reply is held to; send one of them.",
            param=found[1].name,
        )
    return found[0] if found else None


def _of_template(strict: bool | None, template: Mapping[str, Any] | None) -> list[Structure]:
    if not strict:
        return []
    if template is None:
        raise RequestError("strict holds the reply to the shape of a template; send one.", param="strict")
    return [replace(Structure.template(template), name="strict")]


def _of_format(format: ResponseFormat | TextFormat | None, field: str) -> list[Structure]:
    match format:
        case ObjectFormat():
            return [Structure.json_object(field)]
        case SchemaFormat(json_schema=named):
            return [Structure.json_schema(named.schema, f"{field}.json_schema.schema")]
        case FlatSchemaFormat(schema=schema):
            return [Structure.json_schema(schema, f"{field}.schema")]
    return []


def _of_extensions(options: Options) -> list[Structure]:
    """What `regex` and vLLM's fields, the newer and the older ones, ask for."""
    outputs = options.structured_outputs or StructuredOutputs()
    found: list[Structure] = []
    for name, pattern in (
        ("regex", options.regex),
        ("structured_outputs.regex", outputs.regex),
        ("guided_regex", options.guided_regex),
    ):
        if pattern is not None:
            found.append(Structure.regex(pattern, name))
    for name, schema in (("structured_outputs.json", outputs.json), ("guided_json", options.guided_json)):
        if schema is not None:
            found.append(Structure.json_schema(schema, name))
    for name, choice in (("structured_outputs.choice", outputs.choice), ("guided_choice", options.guided_choice)):
        if choice is not None:
            found.append(Structure.choice(choice, name))
    if outputs.json_object:
        found.append(Structure.json_object("structured_outputs.json_object"))
    return found
