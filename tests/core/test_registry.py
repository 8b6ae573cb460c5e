"""The registry: what plugins offer, and what happens when a plugin is wrong. Plugins are modules made in a test's folder."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from textwrap import dedent

import click
import pytest

from kaminari_core.errors import PluginError, UnknownNameError
from kaminari_core.registry import Registry, load_registry, selected_plugins
from kaminari_core.specs import CacheSpec, ModelSpec, QuantizerSpec, SchedulerSpec

HEADER = """
from kaminari_core.hookspecs import hookimpl
from kaminari_core.specs import CacheSpec, ModelSpec, QuantizerSpec, SchedulerSpec
"""


class Plugins:
    """Writes plugin modules and loads a registry from them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.points: list[EntryPoint] = []

    def add(self, name: str, source: str) -> None:
        module = f"plugin_{self.folder.name}_{name}".replace("-", "_")
        (self.folder / f"{module}.py").write_text(HEADER + dedent(source))
        self.points.append(EntryPoint(name, module, "kaminari"))

    def load(self, only: frozenset[str] | None = None) -> Registry:
        return load_registry(self.points, only)


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plugins:
    monkeypatch.syspath_prepend(tmp_path)
    return Plugins(tmp_path)


def model_plugin(name: str, target: str = "somewhere:load", **facts: object) -> str:
    given = "".join(f", {key}={value!r}" for key, value in facts.items())
    return f"""
        @hookimpl
        def kaminari_models():
            return [ModelSpec(name={name!r}, target={target!r}{given})]
    """


def test_specs_of_all_kinds_are_collected_in_tables_by_name(plugins: Plugins) -> None:
    plugins.add(
        "everything",
        """
        @hookimpl
        def kaminari_models():
            yield ModelSpec(name="b", target="m:b")
            yield ModelSpec(name="a", target="m:a")

        @hookimpl
        def kaminari_caches():
            return (CacheSpec(name="c", target="m:c"),)

        @hookimpl
        def kaminari_schedulers():
            return [SchedulerSpec(name="s", target="m:s")]

        @hookimpl
        def kaminari_quantizers():
            return [QuantizerSpec(name="q", target="m:q")]
        """,
    )
    registry = plugins.load()
    assert list(registry.models) == ["a", "b"]
    assert registry.model("b") == ModelSpec(name="b", target="m:b")
    assert registry.cache("c") == CacheSpec(name="c", target="m:c")
    assert registry.scheduler("s") == SchedulerSpec(name="s", target="m:s")
    assert registry.quantizer("q") == QuantizerSpec(name="q", target="m:q")
    assert registry.broken == ()
    assert registry.plugins[0].hooks == (
        "kaminari_caches",
        "kaminari_models",
        "kaminari_quantizers",
        "kaminari_schedulers",
    )


def test_a_hook_may_return_none(plugins: Plugins) -> None:
    plugins.add("empty", "@hookimpl\ndef kaminari_models():\n    return None\n")
    registry = plugins.load()
    assert not registry.models
    assert not registry.broken


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        pytest.param("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'", id="import"),
        pytest.param("raise RuntimeError('no card')", "RuntimeError: no card", id="raises"),
        pytest.param("raise SystemExit(3)", "SystemExit: 3", id="exits"),
        pytest.param("def broken(:", "SyntaxError: invalid syntax", id="syntax"),
        pytest.param("def kaminari_models(): return []", "it implements no hook", id="undecorated"),
        pytest.param(
            "@hookimpl\ndef kaminari_model(): return []",
            "There is no hook 'kaminari_model'. Did you mean 'kaminari_models'?",
            id="misspelled",
        ),
        pytest.param(
            "@hookimpl\ndef kaminari_models(settings): return []",
            "Argument(s) {'settings'} are declared in the hookimpl but can not be found in the hookspec",
            id="argument",
        ),
        pytest.param(
            "@hookimpl\ndef kaminari_models(): return [1 / 0]",
            "kaminari_models failed: ZeroDivisionError: division by zero",
            id="hook-raises",
        ),
        pytest.param("@hookimpl\ndef kaminari_models(): return 5", "'int' object is not iterable", id="no-iterable"),
        pytest.param(
            "@hookimpl\ndef kaminari_models(): return [CacheSpec(name='x', target='m:x')]",
            "kaminari_models returned CacheSpec(name='x', target='m:x', summary=''), which is no ModelSpec",
            id="wrong-kind",
        ),
    ],
)
def test_a_broken_plugin_is_left_out_with_its_reason_and_harms_no_other(
    plugins: Plugins, source: str, reason: str
) -> None:
    plugins.add("good", model_plugin("good"))
    plugins.add("bad", source)
    registry = plugins.load()
    assert [plugin.name for plugin in registry.plugins] == ["good"]
    assert [plugin.name for plugin in registry.broken] == ["bad"]
    assert reason in registry.broken[0].reason
    assert "\n" not in registry.broken[0].reason
    with pytest.raises(UnknownNameError) as error:
        registry.model("missing")
    assert f"bad ({plugins.points[1].value}): " in str(error.value)
    assert reason in str(error.value)


def test_a_plugin_that_breaks_half_way_offers_nothing(plugins: Plugins) -> None:
    plugins.add(
        "half", model_plugin("half") + "\n        @hookimpl\n        def kaminari_caches():\n            1 / 0\n"
    )
    registry = plugins.load()
    assert not registry.models
    assert "kaminari_caches failed" in registry.broken[0].reason


def test_two_specs_of_one_name_are_an_error_that_names_both_targets(plugins: Plugins) -> None:
    plugins.add("one", model_plugin("same", "first.package:load"))
    plugins.add("two", model_plugin("same", "second.package:load"))
    with pytest.raises(PluginError, match=r"model 'same': first\.package:load and second\.package:load") as error:
        plugins.load()
    assert "KAMINARI_PLUGINS" in str(error.value)
    assert plugins.load(frozenset({"two"})).model("same").target == "second.package:load"


def test_two_specs_of_one_name_in_one_plugin_are_an_error_too(plugins: Plugins) -> None:
    plugins.add(
        "twice",
        """
        @hookimpl
        def kaminari_caches():
            return [CacheSpec(name="c", target="m:one"), CacheSpec(name="c", target="m:two")]
        """,
    )
    with pytest.raises(PluginError, match="cache 'c': m:one and m:two"):
        plugins.load()


def test_two_plugins_may_share_an_entry_point_name(plugins: Plugins) -> None:
    plugins.add("ocr", model_plugin("one"))
    plugins.points.append(EntryPoint("ocr", "another_module", "kaminari"))
    (plugins.folder / "another_module.py").write_text(HEADER + dedent(model_plugin("two")))
    assert list(plugins.load().models) == ["one", "two"]


@pytest.mark.parametrize(
    ("asked", "hint"),
    [("qwen3v", "Did you mean 'qwen3vl'?"), ("QWEN3VL", ""), ("zzz", "")],
    ids=["close", "case", "far"],
)
def test_an_unknown_name_says_what_there_is(plugins: Plugins, asked: str, hint: str) -> None:
    plugins.add("one", model_plugin("qwen3vl"))
    plugins.add("two", model_plugin("glmocr"))
    with pytest.raises(UnknownNameError) as error:
        plugins.load().model(asked)
    assert f"There is no model {asked!r}." in str(error.value)
    assert "There are: glmocr, qwen3vl." in str(error.value)
    assert hint in str(error.value)
    assert ("Did you mean" in str(error.value)) == bool(hint)


def test_an_empty_table_says_so(plugins: Plugins) -> None:
    with pytest.raises(UnknownNameError, match=r"There is no quantizer 'int4'\. There are none\."):
        plugins.load().quantizer("int4")


def test_a_model_type_finds_its_model(plugins: Plugins) -> None:
    plugins.add("one", model_plugin("one", model_types=("alpha", "beta")))
    registry = plugins.load()
    assert registry.model_for_type("beta").name == "one"
    with pytest.raises(UnknownNameError, match=r"serves the model_type 'betta'\. Did you mean 'beta'\?"):
        registry.model_for_type("betta")


def test_a_model_type_that_two_models_serve_must_be_chosen(plugins: Plugins) -> None:
    plugins.add("one", model_plugin("one", "a:load", model_types=("alpha",)))
    plugins.add("two", model_plugin("two", "b:load", model_types=("alpha",)))
    with pytest.raises(PluginError, match=r"served by one \(a:load\) and two \(b:load\)"):
        plugins.load().model_for_type("alpha")


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, None), ("core", {"core"}), (" core , http,", {"core", "http"}), ("", set())],
    ids=["unset", "one", "two", "none"],
)
def test_the_environment_restricts_what_is_loaded(value: str | None, expected: set[str] | None) -> None:
    environment = {} if value is None else {"KAMINARI_PLUGINS": value}
    assert selected_plugins(environment) == expected


def test_a_plugin_that_is_not_selected_is_not_imported(plugins: Plugins) -> None:
    plugins.add("wanted", model_plugin("wanted"))
    plugins.add("dangerous", "raise AssertionError('imported')")
    registry = plugins.load(frozenset({"wanted"}))
    assert list(registry.models) == ["wanted"]
    assert registry.broken == ()
    assert plugins.points[1].value not in sys.modules


def test_selecting_a_plugin_that_is_not_installed_is_an_error(plugins: Plugins) -> None:
    plugins.add("qwen3vl", model_plugin("qwen3vl"))
    with pytest.raises(PluginError, match=r"no plugin 'qwen3v'\. Did you mean 'qwen3vl'\?"):
        plugins.load(frozenset({"qwen3v"}))


def command_plugin(command: str, after: str = "") -> str:
    return f"""
        import click

        @hookimpl
        def kaminari_commands(cli):
            cli.add_command(click.Command({command!r}))
            {after}
    """


def test_commands_are_added_in_order_and_a_failing_plugin_adds_none(plugins: Plugins) -> None:
    plugins.add("good", command_plugin("hello"))
    plugins.add("bad", command_plugin("half", after="1 / 0"))
    cli = click.Group()
    registry = plugins.load().add_commands(cli)
    assert list(cli.commands) == ["hello"]
    assert [plugin.name for plugin in registry.plugins] == ["good"]
    assert registry.broken[0].reason == "kaminari_commands failed: ZeroDivisionError: division by zero"


def test_two_commands_of_one_name_are_an_error_that_names_both_plugins(plugins: Plugins) -> None:
    plugins.add("one", command_plugin("bench"))
    plugins.add("two", command_plugin("bench"))
    with pytest.raises(PluginError, match=r"command 'bench': one \(.*\) and two \("):
        plugins.load().add_commands(click.Group())


def route_plugin(path: str, methods: list[str]) -> str:
    return f"""
        from starlette.responses import PlainTextResponse
        from starlette.routing import Route

        @hookimpl
        def kaminari_routes(engines):
            names = ",".join(engines)
            return [Route({path!r}, lambda request: PlainTextResponse(names), methods={methods!r})]
    """


def test_routes_of_all_plugins_are_joined(plugins: Plugins) -> None:
    plugins.add("one", route_plugin("/a", ["GET"]))
    plugins.add("two", route_plugin("/a", ["POST"]))
    assert [sorted(route.methods) for route in plugins.load().routes({})] == [["GET", "HEAD"], ["POST"]]


def test_routes_that_answer_the_same_are_an_error_that_names_both_plugins(plugins: Plugins) -> None:
    plugins.add("one", route_plugin("/a", ["GET"]))
    plugins.add("two", route_plugin("/a", ["GET", "POST"]))
    with pytest.raises(PluginError, match=r"plugins 'one' and 'two' both answer (GET|HEAD) /a"):
        plugins.load().routes({})


def test_a_plugin_that_fails_to_give_its_routes_stops_the_server(plugins: Plugins) -> None:
    plugins.add("bad", "@hookimpl\ndef kaminari_routes(engines):\n    raise RuntimeError('no templates')\n")
    with pytest.raises(PluginError, match="plugin 'bad' failed to give its routes: RuntimeError: no templates"):
        plugins.load().routes({})


def test_the_installed_packages_load_and_every_target_exists() -> None:
    registry = load_registry(only=frozenset({"core", "http", "qwen3vl", "glmocr"}))
    assert registry.broken == ()
    assert "qwen3vl" in registry.models
    specs = [
        *registry.models.values(),
        *registry.caches.values(),
        *registry.schedulers.values(),
        *registry.quantizers.values(),
    ]
    assert [spec.name for spec in specs if not callable(spec.load())] == []


def test_a_target_that_cannot_be_loaded_names_the_spec() -> None:
    with pytest.raises(PluginError, match="'x' names the target 'no_such_package:load'"):
        ModelSpec(name="x", target="no_such_package:load").load()
    with pytest.raises(PluginError, match="has no attribute 'nothing'"):
        ModelSpec(name="x", target="kaminari_core.errors:nothing").load()


def test_loading_the_registry_imports_nothing_heavy() -> None:
    code = (
        "import sys; from kaminari_core.registry import load_registry; load_registry();"
        "print([name for name in ('torch', 'transformers', 'starlette', 'numpy', 'PIL') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
