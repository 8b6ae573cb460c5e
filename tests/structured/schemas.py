"""Random JSON schemas, the same for the same seed, whose documents a reader of random words can finish: everything that could go
on for ever has a bound.
"""

from __future__ import annotations

import random
from typing import Any

NAMES = ("total", "date", "a b", 'quo"te', "ü", "slash/", "back\\slash", "価格", "x" * 20, "$ref", "line\nfeed", "0")
PATTERNS = (r"^[A-Z]{2}[0-9]{3}$", r"^\d{1,3}(\.\d{2})?$", "^(a|b|ab)*c$", r"^[^,]{1,4}$", "x", "^é{2,3}$")
FORMATS = ("date", "time", "uuid", "ipv4")
DEPTH = 3


def random_schema(seed: int) -> dict[str, Any]:
    """One schema. Some have definitions, some of which refer to themselves."""
    draw = random.Random(seed)
    schema = _schema(draw, 0)
    if draw.random() < 0.2:
        node = {
            "type": "object",
            "properties": {"value": _leaf(draw), "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}},
            "required": ["value", "next"],
            "additionalProperties": False,
        }
        return {"$defs": {"node": node}, "type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2}
    return schema


def _schema(draw: random.Random, depth: int) -> dict[str, Any]:
    makers = [_leaf] if depth >= DEPTH else [_leaf, _object, _object, _array, _any_of]
    maker = draw.choice(makers)
    return maker(draw) if maker is _leaf else maker(draw, depth)  # type: ignore[operator]


def _leaf(draw: random.Random) -> dict[str, Any]:
    kind = draw.randrange(9)
    if kind == 0:
        return {"type": "string", "minLength": draw.randint(0, 3), "maxLength": draw.randint(3, 10)}
    if kind == 1:
        return {"type": "string", "pattern": draw.choice(PATTERNS), "maxLength": 12}
    if kind == 2:
        return {"type": "string", "format": draw.choice(FORMATS)}
    if kind == 3:
        return {"enum": draw.sample([1, "one", None, True, 'ö"\\', 2.5, [1, "x"], {"k": "v"}, ""], draw.randint(1, 4))}
    if kind == 4:
        return {"const": draw.choice(["fixed", 7, False, None, {"deep": [1, {}]}])}
    if kind == 5:
        return _integer(draw)
    if kind == 6:
        low = draw.uniform(-100, 100)
        return {"type": "number", "minimum": low, "maximum": low + draw.choice([0.5, 10, 1000])}
    if kind == 7:
        return {"type": ["boolean", "null"]}
    return {"type": draw.choice(["boolean", "null"])}


def _integer(draw: random.Random) -> dict[str, Any]:
    low, span = draw.randint(-1000, 1000), draw.randint(3, 5000)
    upper, lower = draw.choice(["maximum", "exclusiveMaximum"]), draw.choice(["minimum", "exclusiveMinimum"])
    made: dict[str, Any] = {"type": "integer", lower: low, upper: low + span}
    if draw.random() < 0.2:
        made["multipleOf"] = draw.choice([2, 3])
    return made


def _object(draw: random.Random, depth: int) -> dict[str, Any]:
    names = draw.sample(NAMES, draw.randint(0, 4))
    made: dict[str, Any] = {
        "type": "object",
        "properties": {name: _schema(draw, depth + 1) for name in names},
        "required": draw.sample(names, draw.randint(0, len(names))),
    }
    rest = draw.random()
    if rest < 0.5:
        made["additionalProperties"] = False
    elif rest < 0.7:
        # Without a bound it would go on; llguidance takes one only where all names are required.
        made |= {"required": names, "additionalProperties": _leaf(draw), "maxProperties": len(names) + 1}
    return made


def _array(draw: random.Random, depth: int) -> dict[str, Any]:
    least = draw.randint(0, 2)
    made: dict[str, Any] = {
        "type": "array",
        "items": _schema(draw, depth + 1),
        "minItems": least,
        "maxItems": least + draw.randint(0, 2),
    }
    if draw.random() < 0.2:
        made["prefixItems"] = [_leaf(draw), _leaf(draw)]
        made["maxItems"] = max(2, made["maxItems"])
    return made


def _any_of(draw: random.Random, depth: int) -> dict[str, Any]:
    if draw.random() < 0.3:
        return {"oneOf": [{"type": "string", "maxLength": 4}, _integer(draw), {"type": "null"}]}
    return {"anyOf": [_schema(draw, depth + 1) for _ in range(draw.randint(2, 3))]}
