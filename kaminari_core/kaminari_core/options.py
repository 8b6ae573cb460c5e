"""Command-line options. The engine's are generated from `EngineConfig`, so that a setting is declared, documented and given its
default in one place; `run`, `serve` and any plugin's command take them with `@engine_options`.

Every option can be given in the environment as well: `--visual-tokens` is `KAMINARI_VISUAL_TOKENS`. The flag wins.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypeVar, get_args

import click

from kaminari_core import config
from kaminari_core.config import EngineConfig

Function = TypeVar("Function", bound=Callable[..., Any])

_CHOICES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "dtype": ("auto", "float32", "bfloat16", "float16"),
        "sizing": get_args(config.Sizing),
        "draft": get_args(config.Draft),
        "compile_vision": get_args(config.CompileVision),
        "kernels": get_args(config.Kernels),
    }
)


def option(flag: str, *names: str, **settings: Any) -> Callable[[Function], Function]:
    """`click.option` with an environment name made from the flag, shown in the help text."""
    environment = "KAMINARI_" + flag.split("/")[0].removeprefix("--").replace("-", "_").upper()
    return click.option(flag, *names, envvar=environment, show_envvar=True, **settings)


class NumberRange(click.FloatRange):
    """A range that not-a-number is outside of, which compares as inside of every one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number. Fails as click's own types do."""
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number


def model_options(function: Function) -> Function:
    """Add `--model` and `--checkpoint`, passed on as `model: str` and `checkpoint: str | None`."""
    return _model_options(function, required=True)


def optional_model_options(function: Function) -> Function:
    """As `model_options`, for a command that has uses without a model: `model` may be None."""
    return _model_options(function, required=False)


def _model_options(function: Function, *, required: bool) -> Function:
    model = option(
        "--model",
        required=required,
        metavar="NAME|DIR",
        help="A model that a plugin offers (see `kaminari models`), or a checkpoint directory, whose config.json names it.",
    )
    checkpoint = option(
        "--checkpoint",
        metavar="DIR|NAME|HUB_ID",
        help="A directory, a checkpoint that comes with the plugin, such as `tiny`, or owner/name on the Hugging Face hub. "
        "Without it, the one that comes with the plugin.",
    )
    return model(checkpoint(function))


def engine_options(
    defaults: Mapping[str, Any] = MappingProxyType({}), *, shown: Mapping[str, str] = MappingProxyType({})
) -> Callable[[Function], Function]:
    """Add one option per field of `EngineConfig`, passed on under the field's name, with the field's default.

    A command's own `defaults` take the place of the configuration's; one of None means that the command works the value out,
    and `shown` is what the help text then says instead. Turn the values into a configuration with `engine_config`.
    """

    def decorate(function: Function) -> Function:
        for field, text in reversed(list(_documented_fields())):
            default = defaults.get(field.name, field.default)
            function = _engine_option(field, text, default, shown.get(field.name, True))(function)
        return function

    return decorate


def engine_config(**values: Any) -> EngineConfig:
    """The configuration that these option values make; None stands for the configuration's default. Raises UsageError."""
    return EngineConfig(**{name: value for name, value in values.items() if value is not None})


def _engine_option(
    field: dataclasses.Field[Any], text: str, default: Any, shown: str | bool
) -> Callable[[Function], Function]:
    flag = "--" + field.name.replace("_", "-")
    if isinstance(field.default, bool):
        return option(f"{flag}/{flag.replace('--', '--no-', 1)}", default=default, show_default=shown, help=text)
    kind: Any = type(field.default)
    if field.name in _CHOICES:
        kind = click.Choice(_CHOICES[field.name])
    return option(flag, type=kind, default=default, show_default=shown, help=text)


def _documented_fields() -> Iterator[tuple[dataclasses.Field[Any], str]]:
    """Each field of `EngineConfig` with the string below it, which only the source still has."""
    tree = ast.parse(inspect.getsource(config))
    owner = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == EngineConfig.__name__)
    texts: dict[str, str] = {}
    for node, following in zip(owner.body, [*owner.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(following, ast.Expr):
            texts[node.target.id] = ast.literal_eval(following.value)
    for field in dataclasses.fields(EngineConfig):
        yield field, texts[field.name]
