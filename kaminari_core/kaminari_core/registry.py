"""The registry: what the installed plugins offer, as tables of frozen specs.

The seam is between the installed distributions and everything else. Entry points are loaded here, once, at start-up; the hooks
are asked once; after that the program holds a `Registry` value and calls objects directly. Entry points are loaded one by one
instead of by pluggy's own loader, which ends the program when a single plugin cannot be imported, and each plugin is asked by
itself, so that a failure has a name. Nothing here imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from importlib import metadata
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import pluggy

from kaminari_core import hookspecs
from kaminari_core.errors import PluginError, UnknownNameError
from kaminari_core.specs import CacheSpec, ModelSpec, QuantizerSpec, SchedulerSpec, Spec

if TYPE_CHECKING:
    import click

    from kaminari_core.serving import Serving

GROUP = "kaminari"
ONLY = "KAMINARI_PLUGINS"
"""Environment variable with a comma list of entry point names; when it is set, no other plugin is loaded."""

AnySpec = TypeVar("AnySpec", bound=Spec)
Ask = Callable[..., list[Any]]
"""Called as `ask(hook, **arguments)`: asks one plugin alone, passing the arguments that its implementation names."""

_SPEC_HOOKS: Mapping[str, type[Spec]] = MappingProxyType(
    {
        "kaminari_models": ModelSpec,
        "kaminari_caches": CacheSpec,
        "kaminari_schedulers": SchedulerSpec,
        "kaminari_quantizers": QuantizerSpec,
    }
)


@dataclass(frozen=True, slots=True)
class Plugin:
    """A loaded plugin: its entry point, the distribution it came with, and which hooks it implements."""

    name: str
    target: str
    distribution: str
    version: str
    hooks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BrokenPlugin:
    """A plugin that was left out, and why."""

    name: str
    target: str
    distribution: str
    version: str
    reason: str


@dataclass(frozen=True, slots=True)
class Registry:
    """What the plugins offer. A value: made by `load_registry`, passed to whoever needs it, changed by nobody."""

    plugins: tuple[Plugin, ...]
    broken: tuple[BrokenPlugin, ...]
    models: Mapping[str, ModelSpec]
    caches: Mapping[str, CacheSpec]
    schedulers: Mapping[str, SchedulerSpec]
    quantizers: Mapping[str, QuantizerSpec]
    _askers: Mapping[str, Ask] = field(repr=False)

    def model(self, name: str) -> ModelSpec:
        """The model spec of this name. Raises UnknownNameError with what there is."""
        return self._find("model", self.models, name)

    def cache(self, name: str) -> CacheSpec:
        """The cache spec of this name. Raises UnknownNameError with what there is."""
        return self._find("cache", self.caches, name)

    def scheduler(self, name: str) -> SchedulerSpec:
        """The scheduler spec of this name. Raises UnknownNameError with what there is."""
        return self._find("scheduler", self.schedulers, name)

    def quantizer(self, name: str) -> QuantizerSpec:
        """The quantizer spec of this name. Raises UnknownNameError with what there is."""
        return self._find("quantizer", self.quantizers, name)

    def model_for_type(self, model_type: str) -> ModelSpec:
        """The model spec that serves a `model_type` of config.json. Raises UnknownNameError, or PluginError when two do."""
        serving = [spec for spec in self.models.values() if model_type in spec.model_types]
        if len(serving) > 1:
            names = " and ".join(f"{spec.name} ({spec.target})" for spec in serving)
            raise PluginError(f"model_type {model_type!r} is served by {names}; name one of them with --model")
        if not serving:
            known = {served: spec for spec in self.models.values() for served in spec.model_types}
            return self._find("model that serves the model_type", known, model_type)
        return serving[0]

    def offering(self, model: str) -> Plugin:
        """The plugin that brings a model. Raises UnknownNameError as `model` does."""
        spec = self.model(model)
        return next(
            plugin
            for plugin in self._implementing("kaminari_models")
            if any(spec in answer for answer in self._askers[plugin.target]("kaminari_models"))
        )

    def add_commands(self, cli: click.Group) -> Registry:
        """Let each plugin add its commands to `cli`. Returns the registry with the plugins that failed at it marked broken.

        Each plugin fills a group of its own first, so that a plugin that fails half-way adds nothing. Raises PluginError when
        two plugins bring a command of the same name.
        """
        import click

        owners = dict.fromkeys(cli.commands, "the program itself")
        broken = list(self.broken)
        for plugin in self._implementing("kaminari_commands"):
            group = click.Group()
            try:
                self._askers[plugin.target]("kaminari_commands", cli=group)
            except Exception as error:
                broken.append(_broken(plugin, f"kaminari_commands failed: {describe(error)}"))
                continue
            for name, command in group.commands.items():
                if name in owners:
                    raise PluginError(
                        f"two plugins bring a command {name!r}: {owners[name]} and {plugin.name} ({plugin.target}); "
                        f"uninstall one, or name the plugins to load in {ONLY}"
                    )
                owners[name] = f"{plugin.name} ({plugin.target})"
                cli.add_command(command, name)
        failed = {plugin.target for plugin in broken}
        plugins = tuple(plugin for plugin in self.plugins if plugin.target not in failed)
        return replace(self, plugins=plugins, broken=tuple(broken))

    def routes(self, engines: Mapping[str, Serving]) -> list[Any]:
        """The HTTP routes of all plugins for these engines, the names being the served model names.

        Raises PluginError when a plugin fails to give its routes (a server must not start without them in silence), or when
        two routes answer the same method of the same path.
        """
        routes: list[Any] = []
        owners: dict[tuple[str, str], str] = {}
        for plugin in self._implementing("kaminari_routes"):
            try:
                answers = self._askers[plugin.target]("kaminari_routes", engines=engines)
                own = [route for answer in answers for route in answer]
            except Exception as error:
                raise PluginError(f"plugin {plugin.name!r} failed to give its routes: {describe(error)}") from error
            for route in own:
                for method in getattr(route, "methods", None) or ("any method",):
                    key = (getattr(route, "path", repr(route)), method)
                    if key in owners:
                        raise PluginError(f"plugins {owners[key]!r} and {plugin.name!r} both answer {method} {key[0]}")
                    owners[key] = plugin.name
            routes += own
        return routes

    def broken_summary(self) -> str:
        """The plugins that could not be loaded, one a line with the reason; empty when there are none."""
        lines = [f"\n  {plugin.name} ({plugin.target}): {plugin.reason}" for plugin in self.broken]
        return "".join(["\nPlugins that could not be loaded:", *lines, "\n"]) if lines else ""

    def _implementing(self, hook: str) -> list[Plugin]:
        return [plugin for plugin in self.plugins if hook in plugin.hooks]

    def _find(self, kind: str, table: Mapping[str, AnySpec], name: str) -> AnySpec:
        if name in table:
            return table[name]
        raise UnknownNameError((unknown_name(kind, name, table) + self.broken_summary()).rstrip())


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """The message for a name that is not there: what is, and what may have been meant."""
    names = sorted(known)
    close = get_close_matches(name, names, n=1)
    meant = f" Did you mean {close[0]!r}?" if close else ""
    there = f"There are: {', '.join(names)}." if names else "There are none."
    return f"There is no {kind} {name!r}.{meant} {there}"


def selected_plugins(environment: Mapping[str, str] = os.environ) -> frozenset[str] | None:
    """The entry point names that `KAMINARI_PLUGINS` restricts loading to, or None when it is unset: all of them."""
    value = environment.get(ONLY)
    return None if value is None else frozenset(name.strip() for name in value.split(",") if name.strip())


def load_registry(
    entry_points: Iterable[metadata.EntryPoint] | None = None, only: frozenset[str] | None = None
) -> Registry:
    """Load the plugins and ask them what they offer.

    `entry_points` are those of the group `kaminari` of all installed distributions unless given; `only` restricts them by
    name. A plugin that cannot be loaded, breaks a hook's contract or implements a hook that does not exist is left out and
    listed in `broken`. Raises PluginError when two plugins offer the same name, for choosing one of them would be a guess,
    and when `only` names a plugin that is not installed.
    """
    found = metadata.entry_points(group=GROUP) if entry_points is None else entry_points
    points = sorted(found, key=lambda point: (point.name, point.value))
    if only is not None:
        missing = sorted(only - {point.name for point in points})
        if missing:
            raise PluginError(f"{ONLY}: {unknown_name('plugin', missing[0], {point.name for point in points})}")
        points = [point for point in points if point.name in only]
    loading = _Loading()
    for point in points:
        loading.add(point)
    return loading.registry()


class _Loading:
    """The state of `load_registry`: the plugins accepted so far and their specs, a table for each hook."""

    def __init__(self) -> None:
        self.plugins: list[Plugin] = []
        self.broken: list[BrokenPlugin] = []
        self.askers: dict[str, Ask] = {}
        self.tables: dict[str, dict[str, Any]] = {hook: {} for hook in _SPEC_HOOKS}

    def add(self, point: metadata.EntryPoint) -> None:
        """Load one plugin, or note why it is left out. Raises PluginError when it offers a name that is taken."""
        plugin = _plugin(point)
        try:
            ask, hooks = _register(point)
            offered = {hook: _ask_for_specs(ask, hook) for hook in _SPEC_HOOKS if hook in hooks}
        except (Exception, SystemExit) as error:
            # Whatever a plugin does wrong while it loads, the others stay usable and the reason is shown.
            self.broken.append(_broken(plugin, describe(error)))
            return
        for hook, specs in offered.items():
            for spec in specs:
                self._enter(hook, spec)
        self.plugins.append(replace(plugin, hooks=hooks))
        self.askers[plugin.target] = ask

    def _enter(self, hook: str, spec: Spec) -> None:
        other = self.tables[hook].setdefault(spec.name, spec)
        if other is not spec:
            kind = hook.removeprefix("kaminari_").removesuffix("s")
            raise PluginError(
                f"two plugins offer a {kind} {spec.name!r}: {other.target} and {spec.target}; "
                f"uninstall one, or name the plugins to load in {ONLY}"
            )

    def registry(self) -> Registry:
        tables = {hook: MappingProxyType(dict(sorted(table.items()))) for hook, table in self.tables.items()}
        return Registry(
            plugins=tuple(self.plugins),
            broken=tuple(self.broken),
            models=tables["kaminari_models"],
            caches=tables["kaminari_caches"],
            schedulers=tables["kaminari_schedulers"],
            quantizers=tables["kaminari_quantizers"],
            _askers=MappingProxyType(self.askers),
        )


def describe(error: BaseException) -> str:
    """One line about an exception: its message, and its class unless it is one of ours."""
    message = " ".join(str(error).split())
    return message if isinstance(error, PluginError) else f"{type(error).__name__}: {message}"


def _plugin(point: metadata.EntryPoint) -> Plugin:
    # An entry point that was made by hand belongs to no distribution.
    distribution, version = (point.dist.name, point.dist.version) if point.dist else ("", "")
    return Plugin(point.name, point.value, distribution, version, ())


def _broken(plugin: Plugin, reason: str) -> BrokenPlugin:
    return BrokenPlugin(plugin.name, plugin.target, plugin.distribution, plugin.version, reason)


def _register(point: metadata.EntryPoint) -> tuple[Ask, tuple[str, ...]]:
    """Import a plugin and check its hooks. Each has a manager of its own, so that every failure is its own as well."""
    implementation = point.load()
    manager = pluggy.PluginManager(GROUP)
    manager.add_hookspecs(hookspecs)
    known = sorted(vars(manager.hook))
    manager.register(implementation, point.name)
    callers = manager.get_hookcallers(implementation) or []
    if not callers:
        raise PluginError("it implements no hook; is the decorator kaminari_core.hookspecs.hookimpl missing?")
    try:
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        misspelled = next(caller.name for caller in callers if not caller.has_spec())
        raise PluginError(unknown_name("hook", misspelled, known)) from error

    def ask(hook: str, **arguments: Any) -> list[Any]:
        answers: list[Any] = getattr(manager.hook, hook)(**arguments)
        return answers

    return ask, tuple(sorted(caller.name for caller in callers))


def _ask_for_specs(ask: Ask, hook: str) -> list[Spec]:
    kind = _SPEC_HOOKS[hook]
    try:
        specs = [spec for answer in ask(hook) for spec in answer]
    except Exception as error:
        raise PluginError(f"{hook} failed: {describe(error)}") from error
    for spec in specs:
        if not isinstance(spec, kind):
            raise PluginError(f"{hook} returned {spec!r}, which is no {kind.__name__}")
    return specs
