"""The JSON of structured output: what OpenAI's clients send for it, and what those of vLLM do."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

Pattern = Annotated[str, Meta(min_length=1)]
Choices = Annotated[list[Pattern], Meta(min_length=1, max_length=1024)]


class PlainFormat(Struct, tag_field="type", tag="text"):
    """`{"type": "text"}`: no structure."""


class ObjectFormat(Struct, tag_field="type", tag="json_object"):
    """`{"type": "json_object"}`: any JSON object."""


class NamedSchema(Struct):
    """`json_schema` of a chat completion's format. It is enforced, `strict` or not; the model is not shown its name."""

    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class SchemaFormat(Struct, tag_field="type", tag="json_schema"):
    """`{"type": "json_schema", "json_schema": {"name": ..., "schema": {...}, "strict": true}}`."""

    json_schema: NamedSchema


ResponseFormat = PlainFormat | ObjectFormat | SchemaFormat
"""`response_format`."""


class FlatSchemaFormat(NamedSchema, tag_field="type", tag="json_schema"):
    """`{"type": "json_schema", "name": ..., "schema": {...}, "strict": true}`, as `/v1/responses` has it."""


TextFormat = PlainFormat | ObjectFormat | FlatSchemaFormat
"""`text.format` of a response."""


class TextSettings(Struct):
    """`text` of a response. The only verbosity there is has the name that OpenAI gives to its default."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class StructuredOutputs(Struct, forbid_unknown_fields=True):
    """`structured_outputs`, as vLLM has it: one of these."""

    json: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: Pattern | None = None
    choice: Choices | None = None
