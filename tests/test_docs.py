"""The documents say what the code does: each hook, flag, route and metric, and the examples."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import click
import pytest

import make_performance_docs as performance
from kaminari_core import hookspecs, protocols
from kaminari_core.check import pytest_plugin
from kaminari_core.registry import load_registry
from make_cli_docs import DOCUMENT, help_sections, own_program, with_help

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
HOOKS = {name: hook for name, hook in vars(hookspecs).items() if name.startswith("kaminari_") and callable(hook)}


def blocks(document: str, language: str) -> list[str]:
    """The fenced code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", (DOCS / document).read_text(), re.MULTILINE | re.DOTALL)


def options(command: click.Command) -> Iterator[str]:
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            yield from (name for name in [*parameter.opts, *parameter.secondary_opts] if name.startswith("--"))
    if isinstance(command, click.Group):
        for child in command.commands.values():
            yield from options(child)


def test_there_are_six_hooks() -> None:
    assert len(HOOKS) == 6


@pytest.mark.parametrize("name", HOOKS)
def test_each_hook_is_documented_with_its_arguments(name: str) -> None:
    arguments = ", ".join(inspect.signature(HOOKS[name]).parameters)
    assert f"\n## {name}({arguments})\n" in (DOCS / "hooks.md").read_text()


@pytest.mark.parametrize("name", HOOKS)
def test_each_hooks_docstring_holds_an_example(name: str) -> None:
    arguments = ", ".join(inspect.signature(HOOKS[name]).parameters)
    assert f"\n@hookimpl\ndef {name}({arguments}):\n    " in inspect.cleandoc(HOOKS[name].__doc__ or "")


@pytest.mark.parametrize("name", HOOKS)
def test_each_hooks_example_is_a_working_plugin(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = [block for block in blocks("hooks.md", "python") if f"def {name}(" in block]
    (tmp_path / f"example_of_{name}.py").write_text(example)
    monkeypatch.syspath_prepend(tmp_path)
    registry = load_registry([EntryPoint("example", f"example_of_{name}", "kaminari")])
    cli = click.Group()
    registry = registry.add_commands(cli)
    assert registry.broken == ()
    assert registry.plugins[0].hooks == (name,)
    given = [*registry.models, *registry.caches, *registry.schedulers, *registry.quantizers, *cli.commands]
    assert len(given) + len(registry.routes({})) == 1


def test_the_tutorial_names_every_member_of_a_model() -> None:
    text = (DOCS / "plugins.md").read_text()
    members = [*protocols.Model.__annotations__, *(name for name in vars(protocols.Model) if not name.startswith("_"))]
    assert len(members) >= 9
    assert [name for name in members if f"`{name}`" not in text] == []


def test_the_help_texts_are_those_of_the_code() -> None:
    text = DOCUMENT.read_text()
    assert text == with_help(text, help_sections(own_program())), "run `make docs`"


def test_each_flag_is_documented() -> None:
    text = DOCUMENT.read_text()
    flags = set(options(own_program()))
    assert {"--model", "--visual-tokens", "--no-compile", "--port"} <= flags
    assert [flag for flag in sorted(flags) if not re.search(rf"{flag}\b", text)] == []


def test_each_flag_that_a_document_names_exists() -> None:
    flags = {*options(own_program()), "--help"}
    # Scripts have options of their own; the last is pip's.
    for script in [*ROOT.glob("scripts/*.py"), *ROOT.glob("benchmarks/*.py")]:
        flags |= set(re.findall(r'add_argument\(\s*"(--[a-z0-9-]+)"', script.read_text()))
    flags |= {"--find-links"}
    flags |= set(re.findall(r'addoption\(\s*"(--[a-z-]+)"', inspect.getsource(pytest_plugin)))
    for document in [*DOCS.glob("*.md"), *ROOT.glob("*.md"), *ROOT.glob("kaminari_*/README.md")]:
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", document.read_text()))
        assert named - flags == set(), document.name


def test_each_route_is_documented_with_its_methods() -> None:
    text = (DOCS / "http.md").read_text()
    routes = load_registry(only=frozenset({"http"})).routes({})
    assert len(routes) >= 6
    for route in routes:
        for method in route.methods - {"HEAD"}:
            assert f"`{method} {route.path}`" in text


def test_each_metric_is_documented() -> None:
    from kaminari_http.metrics import Metrics

    text = (DOCS / "http.md").read_text()
    names = re.findall(r"^# TYPE (\w+)", Metrics({}).render().decode(), re.MULTILINE)
    assert len(names) > 8
    assert [name for name in names if f"`{name}" not in text] == []


@pytest.mark.parametrize(
    "document", sorted(str(path.relative_to(ROOT)) for path in [*DOCS.glob("*.md"), *ROOT.glob("*.md")])
)
def test_links_between_documents_lead_somewhere(document: str) -> None:
    text = (ROOT / document).read_text()
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if not target.startswith(("http:", "https:")):
            assert ((ROOT / document).parent / target).exists(), target


def test_the_figures_are_those_of_the_committed_results() -> None:
    text = performance.DOCUMENT.read_text(encoding="utf-8")
    assert "| contender |" in text
    assert performance.rendered(text) == text
