"""What is done to a schema before llguidance compiles it: one promise that a grammar cannot keep is found, and objects that say
nothing of further properties are closed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from kaminari_core.errors import RequestError

NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose value maps names to schemas."""
SINGLE = ("additionalProperties", "items", "not", "if", "then", "else", "contains", "propertyNames")
LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
COMBINING = frozenset({"anyOf", "oneOf", "allOf", "$ref", "dependentSchemas"})
CONDITIONAL = frozenset({"not", "if", "unevaluatedProperties"})


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


def close_objects(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with `additionalProperties: false` in every object that names properties and says nothing of others.

    What is valid under the result is valid under the schema. A model that may add properties of its own often does, and does
    not stop. A schema whose objects are put together of several parts is left as it is: each part would exclude the others.
    """
    for each in _schemas(schema):
        parts = COMBINING & each.keys()
        if CONDITIONAL & each.keys() or ("properties" in each and parts) or len(each.get("allOf", ())) > 1:
            return schema
    closed = copy.deepcopy(schema)
    for each in _schemas(closed):
        names = each.get("properties")
        if isinstance(names, dict) and {"additionalProperties", "patternProperties"}.isdisjoint(each):
            each.setdefault("additionalProperties", bool(set(each.get("required", ())) - names.keys()))
    return closed


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
