"""From a JSON template, which shows the shape of an answer, to the JSON schema of that shape."""

from __future__ import annotations

from typing import Any

from kaminari_core.tasks import check_template


def schema_of_template(template: Any) -> dict[str, Any]:
    """The schema that admits exactly the template's fields, all of them, in its order; empty strings stand for any string.

    A list stands for any number of what it shows: of one of its items, or of strings where it is empty. Raises RequestError for
    what is no template, see `tasks`.
    """
    check_template(template)
    return _schema(template)


def _schema(value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        fields = {name: _schema(inner) for name, inner in value.items()}
        return {
            "type": "object",
            "properties": fields,
            "required": list(fields),
            "additionalProperties": False,
        }
    if isinstance(value, list):
        shown: list[dict[str, Any]] = []
        for item in value:
            if (schema := _schema(item)) not in shown:
                shown.append(schema)
        items = shown[0] if len(shown) == 1 else {"anyOf": shown} if shown else {"type": "string"}
        return {"type": "array", "items": items}
    return {"type": "string"}
