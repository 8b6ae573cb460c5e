"""Who may import whom, read from the source. These rules keep a model plugin independent of the server, of other models and of
how plugins are found, and keep the command line quick.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("kaminari_core", "kaminari_http", "kaminari_qwen3vl", "kaminari_glmocr")
FILES = {
    ".".join(file.relative_to(ROOT / package).with_suffix("").parts).removesuffix(".__init__"): file
    for package in PACKAGES
    for file in sorted((ROOT / package / package).rglob("*.py"))
}
HEAVY = {
    "torch",
    "transformers",
    "numpy",
    "PIL",
    "safetensors",
    "tokenizers",
    "starlette",
    "uvicorn",
    "msgspec",
    "sse_starlette",
}
HEAVY |= {"prometheus_client", "tqdm", "jinja2", "torchao", "llguidance", "pydantic", "jsonschema"}


def statements(body: list[ast.stmt], *, inside_functions: bool) -> Iterator[ast.stmt]:
    """All statements that run when a module is imported, or also those that run later; type-checking blocks never do."""
    for node in body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from statements(node.orelse, inside_functions=inside_functions)
            continue
        yield node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not inside_functions:
            continue
        for field in ("body", "orelse", "finalbody"):
            yield from statements(getattr(node, field, []), inside_functions=inside_functions)
        for part in [*getattr(node, "handlers", []), *getattr(node, "cases", [])]:
            yield from statements(part.body, inside_functions=inside_functions)


def imports(module: str, *, inside_functions: bool) -> set[str]:
    """The modules that a module imports; `from package import name` counts as package.name where that is a module."""
    found = set()
    for node in statements(ast.parse(FILES[module].read_text()).body, inside_functions=inside_functions):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively, which these rules do not read"
            assert node.module is not None
            found |= {
                f"{node.module}.{alias.name}" if f"{node.module}.{alias.name}" in FILES else node.module
                for alias in node.names
            }
    return found


def reached(start: str, *, inside_functions: bool) -> set[str]:
    """Everything that a module imports, directly or through modules of these packages."""
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        if module in FILES:
            waiting += imports(module, inside_functions=inside_functions)
            # Importing a.b runs a first.
            waiting += [module.rpartition(".")[0]] if "." in module else []
    return seen - {start}


def roots(modules: set[str]) -> set[str]:
    return {module.split(".")[0] for module in modules}


@pytest.mark.parametrize("module", FILES)
def test_packages_import_the_core_only(module: str) -> None:
    own = module.split(".")[0]
    siblings = (roots(imports(module, inside_functions=True)) & set(PACKAGES)) - {own, "kaminari_core"}
    assert siblings == set()


@pytest.mark.parametrize("module", [module for module in FILES if module.startswith("kaminari_core")])
def test_the_core_knows_no_model_library(module: str) -> None:
    assert roots(imports(module, inside_functions=True)).isdisjoint(
        {"transformers", "tokenizers", "starlette", "uvicorn"}
    )


@pytest.mark.parametrize(
    "module", [module for module in FILES if module not in ("kaminari_core.registry", "kaminari_core.hookspecs")]
)
def test_only_the_registry_and_the_hooks_know_pluggy(module: str) -> None:
    assert "pluggy" not in roots(imports(module, inside_functions=True))


def test_nothing_from_the_engine_down_knows_plugins_or_the_command_line() -> None:
    below = reached("kaminari_core.engine", inside_functions=True)
    assert {"kaminari_core.loop", "kaminari_core.decode"} <= below
    assert roots(below).isdisjoint({"pluggy", "click", "tqdm"})
    assert below.isdisjoint(
        f"kaminari_core.{name}" for name in ("registry", "hookspecs", "specs", "builtin", "cli", "launch", "options")
    )


def test_a_scheduler_sees_neither_cache_nor_engine() -> None:
    below = {
        module for module in reached("kaminari_core.scheduler", inside_functions=True) if module.startswith("kaminari")
    }
    values = {f"kaminari_core{name}" for name in ("", ".config", ".errors", ".protocols", ".flow")}
    assert below <= values | {"kaminari_core.evidence", "kaminari_core.evidence.facts"}


def test_a_models_package_does_not_know_the_engine() -> None:
    for module in FILES:
        if module.startswith(("kaminari_qwen3vl", "kaminari_glmocr")):
            used = imports(module, inside_functions=True)
            assert used.isdisjoint(
                f"kaminari_core.{name}" for name in ("engine", "loop", "live", "scheduler", "registry", "cli", "launch")
            )


@pytest.mark.parametrize(
    "module",
    [
        "kaminari_core.cli",
        "kaminari_core.builtin",
        "kaminari_core.commands_bench",
        "kaminari_core.commands_check",
        "kaminari_core.commands_compare",
        "kaminari_core.commands_doctor",
        "kaminari_core.commands_compile",
        "kaminari_core.commands_eval",
        "kaminari_core.commands_fit",
        "kaminari_core.commands_list",
        "kaminari_core.commands_read",
        "kaminari_core.commands_run",
        "kaminari_core.launch",
        "kaminari_http.plugin",
        "kaminari_http.serve",
        "kaminari_qwen3vl.plugin",
        "kaminari_glmocr.plugin",
    ],
)
def test_the_command_line_imports_nothing_heavy(module: str) -> None:
    assert roots(reached(module, inside_functions=False)) & HEAVY == set()


def test_the_rules_read_what_is_there() -> None:
    # Were the reader blind, every rule above would hold.
    assert "torch" in roots(
        imports("kaminari_core.engine", inside_functions=True) | reached("kaminari_core.engine", inside_functions=False)
    )
    assert "kaminari_core.engine" in imports("kaminari_core.launch", inside_functions=True)
    assert "kaminari_core.engine" not in imports("kaminari_core.launch", inside_functions=False)
    assert "pluggy" in roots(imports("kaminari_core.registry", inside_functions=False))
