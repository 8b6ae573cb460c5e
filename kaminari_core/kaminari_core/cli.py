"""The `kaminari` program: a click group that the plugins fill, the core's own plugin among them.

The seam is between the errors that the packages raise and what a person at a terminal sees: one line on stderr and an exit
code, for plugins' commands as well. Nothing here imports torch, so that `kaminari --help` answers at once.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any

import click

from kaminari_core import __version__
from kaminari_core.errors import KaminariError, UsageError
from kaminari_core.registry import Registry, load_registry, selected_plugins

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it: 128 + SIGINT."""
CLOSED_PIPE = 141
"""Exit code when the reader of stdout has left: 128 + SIGPIPE."""


class Misuse(click.ClickException):
    """Options that cannot be used, told without the usage lines that click's own UsageError adds."""

    exit_code = 2


class Program(click.Group):
    """A group whose commands may raise KaminariError, be interrupted, or lose the reader of their output."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; its failures become one line and an exit code."""
        try:
            return super().invoke(ctx)
        except KaminariError as error:
            kind = Misuse if isinstance(error, UsageError) else click.ClickException
            raise kind(str(error)) from error
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            raise click.exceptions.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            _abandon_stdout()
            raise click.exceptions.Exit(CLOSED_PIPE) from None
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            _abandon_stdout()
            raise click.ClickException(f"the output cannot be written: {error.strerror}") from error

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command; when there is none, a plugin that could not be loaded may be why, so it is named."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            registry = ctx.find_object(Registry)
            assert registry is not None, "the program is made for a registry"
            raise click.UsageError(error.message + registry.broken_summary().rstrip(), ctx) from error


def _abandon_stdout() -> None:
    """Drop what is still buffered; otherwise the interpreter reports once more, when it ends, that it cannot be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def program(registry: Registry) -> Program:
    """The program with the commands of the registry's plugins. Raises PluginError when two are of one name."""

    @click.group(cls=Program, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
    @click.version_option(__version__, prog_name="kaminari", message="%(prog)s %(version)s")
    def kaminari() -> None:
        """Run vision-language models on one small card, or on none."""

    assert isinstance(kaminari, Program)
    kaminari.context_settings["obj"] = registry.add_commands(kaminari)
    return kaminari


def main() -> None:
    """Entry point of the console script."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # What the terminal's encoding lacks is shown as its escape, not as a traceback and not as a question mark.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        cli = program(load_registry(only=selected_plugins()))
    except KaminariError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(1)
    cli.main(prog_name="kaminari")
