"""The repository as a set of distributions: versions, pins, declared dependencies, entry points."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("kaminari_core", "kaminari_http", "kaminari_qwen3vl", "kaminari_glmocr")
MODULE_OF = {
    "pillow": "PIL",
    "huggingface-hub": "huggingface_hub",
    "sse-starlette": "sse_starlette",
    "prometheus-client": "prometheus_client",
}


def manifest(package: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / package / "pyproject.toml").read_text())


def requirements(package: str) -> dict[str, str]:
    """Name to version range, optional ones included."""
    project = manifest(package)["project"]
    lines = [
        *project["dependencies"],
        *(line for extra in project.get("optional-dependencies", {}).values() for line in extra),
    ]
    pairs = [re.fullmatch(r"([A-Za-z0-9-]+)(?:\[[a-z,]+\])?(.*)", line) for line in lines]
    return {match[1]: match[2] for match in pairs if match}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_distribution_is_complete(package: str) -> None:
    project = manifest(package)["project"]
    assert project["name"] == package.replace("_", "-")
    assert project["version"] == manifest(".")["project"]["version"]
    assert (ROOT / package / "README.md").read_text().startswith(f"# {project['name']}\n")
    assert (ROOT / package / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    assert (ROOT / package / package / "py.typed").is_file()
    assert manifest(package)["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == [package]
    assert re.search(rf"^-e \./{package}(\[[a-z,]+\])?$", (ROOT / "requirements-dev.txt").read_text(), re.MULTILINE)


def test_the_core_says_its_own_version() -> None:
    from kaminari_core import __version__

    assert __version__ == manifest("kaminari_core")["project"]["version"] == metadata.version("kaminari-core")


@pytest.mark.parametrize("package", PACKAGES)
def test_siblings_are_pinned_to_the_same_version(package: str) -> None:
    version = manifest(package)["project"]["version"]
    siblings = {name: wanted for name, wanted in requirements(package).items() if name.startswith("kaminari")}
    assert set(siblings.values()) <= {f"=={version}"}
    assert siblings.keys() >= ({"kaminari-core"} if package != "kaminari_core" else set())
    # It is not imported, but with it `kaminari serve` comes along with the model.
    assert ("kaminari-http" in siblings) == (package in ("kaminari_qwen3vl", "kaminari_glmocr"))


def test_the_whole_is_its_parts() -> None:
    lines = manifest(".")["project"]["dependencies"]
    assert sorted(lines) == sorted(f"{package.replace('_', '-')} @ {{root:uri}}/{package}" for package in PACKAGES)
    assert "Private :: Do Not Upload" in manifest(".")["project"]["classifiers"]


def imported(folder: Path) -> set[str]:
    """The top-level modules that the files of a folder import, the standard library's left out."""
    found = set()
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.split(".")[0])
    return found - set(sys.stdlib_module_names)


def modules(names: Iterable[str]) -> set[str]:
    """The import names of distributions."""
    return {MODULE_OF.get(name, name.replace("-", "_")) for name in names}


@pytest.mark.parametrize("package", PACKAGES)
def test_what_is_imported_is_declared(package: str) -> None:
    assert imported(ROOT / package / package) - {"kaminari_core", package} - modules(requirements(package)) == set()


@pytest.mark.parametrize("folder", ["tests", "scripts", "benchmarks"])
def test_what_development_imports_is_in_its_requirements(folder: str) -> None:
    listed = re.findall(r"^([A-Za-z0-9-]+)>=|^(httpx2)$", (ROOT / "requirements-dev.txt").read_text(), re.MULTILINE)
    known = modules(name for pair in listed for name in pair) | set(PACKAGES) | {"outside_plugin"}
    known |= {name for package in PACKAGES for name in modules(requirements(package))}
    own = {path.stem for path in [*ROOT.glob("scripts/*"), *ROOT.glob("benchmarks/*")]}
    # A rival, which runs in an environment of its own.
    own |= {"llama_cpp"}
    assert imported(ROOT / folder) - known - own - {"tests", "scripts", "benchmarks"} == set()


@pytest.mark.parametrize("package", PACKAGES)
def test_torchvision_is_never_required(package: str) -> None:
    assert "torchvision" not in requirements(package)
    assert "torchvision" not in (ROOT / "requirements-dev.txt").read_text()


def test_pins_lie_inside_the_ranges_and_are_what_is_installed() -> None:
    from packaging.specifiers import SpecifierSet

    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    assert set(pins) == {"torch", "torchao", "transformers"}
    for package in PACKAGES:
        for name, wanted in requirements(package).items():
            assert name not in pins or pins[name] in SpecifierSet(wanted)
    for name in ("torch", "transformers"):
        assert metadata.version(name).split("+")[0] == pins[name]


@pytest.mark.parametrize("package", PACKAGES)
def test_the_entry_point_names_a_module(package: str) -> None:
    (target,) = manifest(package)["project"]["entry-points"]["kaminari"].values()
    found = {point.value for point in metadata.entry_points(group="kaminari")}
    assert target in found
    assert (ROOT / package / Path(*target.split("."))).with_suffix(".py").is_file()


@pytest.mark.parametrize(
    "path", sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("kaminari_*/kaminari_*/**/*.py"))
)
def test_a_file_is_read_in_one_sitting_and_a_function_fits_a_screen(path: str) -> None:
    source = (ROOT / path).read_text()
    assert len(source.splitlines()) <= 400
    assert source.isascii()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < 60, node.name
