"""Structured output over HTTP, with OpenAI's own client and with the fields that vLLM's users send."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
from pydantic import BaseModel, Field

from tests.http.serving import Running, picture, picture_message

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "shop": {"type": "string", "maxLength": 8},
        "total": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["shop", "total"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "receipt", "schema": SCHEMA, "strict": True}}


class Receipt(BaseModel):
    """What the clients ask for."""

    shop: str = Field(max_length=8)
    total: int = Field(ge=0, le=999)
    paid: bool


def test_chat_with_a_schema_and_a_picture(tiny: Running) -> None:
    reply = tiny.openai().chat.completions.create(
        model="tiny",
        messages=[picture_message(picture())],
        response_format=FORMAT,  # type: ignore[list-item, call-overload]
    )
    jsonschema.validate(json.loads(reply.choices[0].message.content), SCHEMA)
    assert reply.choices[0].finish_reason == "stop"
    assert reply.kaminari["choices"][0]["complete"] is True
