"""What llguidance takes for enforceable and is not, found in a schema before it is compiled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kaminari_core.errors import RequestError

NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose value maps names to schemas."""
SINGLE = ("additionalProperties", "items", "not", "if", "then", "else", "contains", "propertyNames")
LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")


def check_enforceable(schema: Any, name: str) -> None:
    """Raise RequestError for a schema that a document could break although every token of it was allowed.

    A grammar does not remember the names of properties that the schema does not name, so the same name could come twice; and
    twice the same name is one property to who reads the document.
    """
    for each in _schemas(schema):
        least = each.get("minProperties", 0)
        free = each.get("additionalProperties", True) is not False or each.get("patternProperties")
        if isinstance(least, int) and free and least > len(each.get("required", ())):
            raise RequestError(
                f"{name} cannot be enforced: minProperties is {least}, but additionalProperties is not false; name the "
                "properties, or require as many",
                param=name,
                code="invalid_structure",
            )


def _schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """A schema and all that are in it, where they are objects."""
    waiting = [schema]
    while waiting:
        each = waiting.pop()
        if not isinstance(each, dict):
            continue
        yield each
        for key in NAMED:
            if isinstance(each.get(key), dict):
                waiting += each[key].values()
        waiting += [each[key] for key in SINGLE if key in each]
        for key in LISTED:
            if isinstance(each.get(key), list):
                waiting += each[key]
