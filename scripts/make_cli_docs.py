"""Writes the generated part of docs/cli.md: the help text of the program and of each command, from the code.

Usage: python scripts/make_cli_docs.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from kaminari_core.cli import program
from kaminari_core.registry import load_registry

DOCUMENT = Path(__file__).parent.parent / "docs" / "cli.md"
BEGIN, END = "<!-- help:begin (written by scripts/make_cli_docs.py) -->\n", "<!-- help:end -->\n"
PLUGINS = frozenset({"core", "http", "qwen3vl", "glmocr"})
"""Only what this repository brings; another plugin that happens to be installed has documents of its own."""


def own_program() -> click.Group:
    """The program with the commands of this repository's packages. All of them must load."""
    registry = load_registry(only=PLUGINS)
    cli = program(registry)
    broken = registry.broken_summary() or cli.context_settings["obj"].broken_summary()
    if broken:
        raise SystemExit(broken)
    return cli


def help_sections(cli: click.Group) -> str:
    """One section per command, the program itself first."""
    return "\n".join(
        _sections(cli, click.Context(cli, info_name="kaminari", terminal_width=100, **cli.context_settings))
    )


def with_help(document: str, sections: str) -> str:
    """The document with its generated part replaced."""
    head, _, rest = document.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{sections}\n{END}{tail}"


def _sections(command: click.Command, context: click.Context) -> Iterator[str]:
    yield f"## {context.command_path}\n\n```text\n{command.get_help(context)}\n```\n"
    if isinstance(command, click.Group):
        for name, child in sorted(command.commands.items()):
            yield from _sections(child, click.Context(child, info_name=name, parent=context, terminal_width=100))


def main() -> None:
    """Update the document in place."""
    DOCUMENT.write_text(with_help(DOCUMENT.read_text(encoding="utf-8"), help_sections(own_program())), encoding="utf-8")


if __name__ == "__main__":
    main()
