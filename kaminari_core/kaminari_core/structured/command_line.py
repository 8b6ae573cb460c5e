"""The options by which a command holds a reply to a structure: `--schema`, `--regex`, `--json-object`, `--strict`.

Kept apart from the rest of the package, which knows no command line.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from kaminari_core.errors import RequestError, UsageError
from kaminari_core.options import option
from kaminari_core.structured.structure import Structure

Function = TypeVar("Function", bound=Callable[..., Any])


def structure_options(function: Function) -> Function:
    """Add the options, passed on as `schema: str | None`, `regex: str | None`, `json_object: bool` and `strict: bool`."""
    decorators = (
        option(
            "--schema",
            metavar="JSON|FILE|FILE.py:NAME",
            help="Hold the reply to a JSON schema: the schema, a file of it, or a Pydantic model in a Python file or module.",
        ),
        option("--regex", metavar="PATTERN", help="Hold the reply to a regular expression, which matches all of it."),
        option("--json-object", is_flag=True, help="Hold the reply to be a JSON object."),
        option("--strict", is_flag=True, help="Hold the reply to the shape of the --template."),
    )
    for decorator in reversed(decorators):
        function = decorator(function)
    return function


def read_structure(
    schema: str | None, regex: str | None, json_object: bool, strict: bool, template: Any
) -> Structure | None:
    """The structure that the options name; `template` is the value that `--template` holds, None without one.

    Raises UsageError for more than one, and for what cannot be read or enforced.
    """
    given = {
        "--schema": schema is not None,
        "--regex": regex is not None,
        "--json-object": json_object,
        "--strict": strict,
    }
    names = [name for name, is_given in given.items() if is_given]
    if len(names) > 1:
        raise UsageError(f"{' and '.join(names)} both say what the reply is held to; give one of them")
    if strict and template is None:
        raise UsageError("--strict holds the reply to the shape of the --template; give one")
    try:
        if schema is not None:
            structure = Structure.json_schema(_schema(schema), "--schema")
        elif regex is not None:
            structure = Structure.regex(regex, "--regex")
        elif json_object:
            structure = Structure.json_object("--json-object")
        elif strict:
            structure = Structure.template(template, "--template")
        else:
            return None
        # Found now, not after the weights have been loaded.
        from kaminari_core.structured.grammars import check_structure

        check_structure(structure)
    except RequestError as error:
        raise UsageError(str(error)) from error
    return structure


def _schema(given: str) -> Any:
    """A schema's text, or the model that `FILE.py:NAME` or `package.module:NAME` names."""
    if given.lstrip().startswith("{"):
        return given
    place, _, name = given.rpartition(":")
    if name.isidentifier() and not Path(given).exists():
        return _attribute(place, name)
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the schema file {given!r} cannot be read: {error}") from error


def _attribute(place: str, name: str) -> Any:
    try:
        module = _module_in_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        return getattr(module, name)
    except Exception as error:  # whatever the user's own code raises
        raise UsageError(f"{name} cannot be taken from {place!r}: {type(error).__name__}: {error}") from error


def _module_in_file(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None, "a file that ends in .py has a loader"
    module = importlib.util.module_from_spec(spec)
    # Where annotations are looked up by the names of their modules.
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module
