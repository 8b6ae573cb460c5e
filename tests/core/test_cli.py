"""The command line, driven as a person does: arguments in, text, errors and exit codes out."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import select
import signal
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from kaminari_core.cli import program
from kaminari_core.config import EngineConfig
from kaminari_core.options import engine_config, engine_options
from kaminari_core.progress import terminal_progress
from kaminari_core.registry import Registry, load_registry

OURS = frozenset({"core", "http", "qwen3vl", "glmocr"})
KAMINARI = [sys.executable, "-c", "from kaminari_core.cli import main; main()"]

Run = Callable[..., Result]


@pytest.fixture
def kaminari(outside_registry: Registry) -> Run:
    """Runs the program with the core's plugin and the third party's."""
    return lambda *arguments: CliRunner().invoke(program(outside_registry), [str(argument) for argument in arguments])


@pytest.fixture
def run(kaminari: Run) -> Run:
    """Runs `kaminari run --model alphabet --no-compile`."""
    return lambda *arguments: kaminari("run", "--model", "alphabet", "--no-compile", *arguments)


def commands(command: click.Command) -> Iterator[click.Command]:
    yield command
    if isinstance(command, click.Group):
        for child in command.commands.values():
            yield from commands(child)


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from kaminari_core.cli import main; sys.argv = ['kaminari', '--help']\n"
        "try: main()\n"
        "except SystemExit: print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stderr.split()
    assert "Usage: kaminari" in done.stdout
    heavy = {"torch", "transformers", "numpy", "PIL", "starlette", "uvicorn", "msgspec", "prometheus_client", "tqdm"}
    assert heavy.isdisjoint(loaded)
    # An interpreter with click, pluggy and the entry points of this repository loads about 200; torch alone brings 1,000.
    assert len(loaded) < 300


def test_every_option_of_every_command_has_its_environment_name() -> None:
    checked = 0
    for command in commands(program(load_registry(only=OURS))):
        for parameter in command.params:
            if isinstance(parameter, click.Option) and parameter.name not in ("help", "version"):
                flag = next(name for name in parameter.opts if name.startswith("--"))
                assert parameter.envvar == "KAMINARI_" + flag[2:].upper().replace("-", "_")
                assert parameter.show_envvar, f"{command.name} {flag}"
                assert parameter.help, f"{command.name} {flag}"
                checked += 1
    assert checked > len(dataclasses.fields(EngineConfig))


@pytest.fixture
def show_config() -> click.Command:
    """A command that prints the configuration its engine options make."""

    @click.command()
    @engine_options()
    def show(**values: Any) -> None:
        click.echo(json.dumps(dataclasses.asdict(engine_config(**values))))

    return show


def test_engine_options_are_the_fields_of_the_configuration_with_their_defaults(show_config: click.Command) -> None:
    assert [parameter.name for parameter in show_config.params] == [
        field.name for field in dataclasses.fields(EngineConfig)
    ]
    done = CliRunner().invoke(show_config, [])
    assert json.loads(done.stdout) == dataclasses.asdict(EngineConfig())


def test_an_engine_option_comes_from_the_flag_before_the_environment(show_config: click.Command) -> None:
    environment = {"KAMINARI_SLOTS": "7", "KAMINARI_SIZING": "exact", "KAMINARI_COMPILE": "0"}
    done = CliRunner().invoke(show_config, ["--slots", "3"], env=environment)
    shown = json.loads(done.stdout)
    assert (shown["slots"], shown["sizing"], shown["compile"]) == (3, "exact", False)


def test_models_lists_facts(kaminari: Run) -> None:
    done = kaminari("models")
    assert done.exit_code == 0
    assert done.stdout.splitlines() == [
        "alphabet  continues the alphabet",
        "  checkpoints: latin, DIR, HUB_ID",
        "  model types: alphabet",
        "  tasks: whole",
    ]
    assert json.loads(kaminari("models", "--json").stdout) == [
        {
            "name": "alphabet",
            "summary": "continues the alphabet",
            "target": "outside_plugin.model:Alphabet",
            "model_types": ["alphabet"],
            "checkpoints": ["latin"],
            "tasks": {"whole": "a"},
        }
    ]


def test_plugins_lists_what_is_installed(outside_environment: dict[str, str]) -> None:
    done = subprocess.run([*KAMINARI, "plugins"], capture_output=True, text=True, env=outside_environment, check=True)
    assert "outside  outside-plugin 0.3.0  (outside_plugin.plugin)\n  hooks: kaminari_models\n" in done.stdout
    assert "core  kaminari-core 0.1.0  (kaminari_core.builtin)" in done.stdout
    assert "static  one preallocated row" in done.stdout


def test_a_broken_plugin_is_listed_and_explains_a_missing_command(
    outside_environment: dict[str, str], tmp_path: Path
) -> None:
    entry_points = next(tmp_path.glob("site/*.dist-info/entry_points.txt"))
    entry_points.write_text("[kaminari]\noutside = no_such_module\n")
    reason = "outside (no_such_module): ModuleNotFoundError: No module named 'no_such_module'"
    listed = subprocess.run([*KAMINARI, "plugins"], capture_output=True, text=True, env=outside_environment, check=True)
    assert reason in listed.stdout
    found = subprocess.run([*KAMINARI, "plugins", "--json"], capture_output=True, text=True, env=outside_environment)
    assert json.loads(found.stdout)["broken"][0]["distribution"] == "outside-plugin"
    missing = subprocess.run([*KAMINARI, "alphabetize"], capture_output=True, text=True, env=outside_environment)
    assert missing.returncode == 2
    assert "No such command 'alphabetize'" in missing.stderr
    assert reason in missing.stderr


def test_two_specs_of_one_name_end_the_program_with_one_line(
    outside_environment: dict[str, str], tmp_path: Path
) -> None:
    entry_points = next(tmp_path.glob("site/*.dist-info/entry_points.txt"))
    (tmp_path / "site" / "rival.py").write_text(
        "from kaminari_core.hookspecs import hookimpl\nfrom kaminari_core.specs import CacheSpec\n"
        "@hookimpl\ndef kaminari_caches(): return [CacheSpec(name='static', target='rival:Cache')]\n"
    )
    entry_points.write_text("[kaminari]\noutside = rival\n")
    done = subprocess.run([*KAMINARI, "models"], capture_output=True, text=True, env=outside_environment)
    assert done.returncode == 1
    assert done.stderr.startswith(
        "Error: two plugins offer a cache 'static': kaminari_core.cache:StaticCache and rival:Cache"
    )
    assert done.stderr.count("\n") == 1


def test_run_streams_the_reply_and_ends_it_with_a_newline(run: Run) -> None:
    done = run("--checkpoint", "latin", "w")
    assert (done.stdout, done.stderr, done.exit_code) == ("xyz\n", "", 0)


def test_run_as_a_separate_program(outside_environment: dict[str, str]) -> None:
    command = [*KAMINARI, "run", "--model", "alphabet", "--no-compile", "u"]
    done = subprocess.run(command, capture_output=True, text=True, env=outside_environment)
    assert (done.stdout, done.returncode) == ("vwxyz\n", 0)
    assert "using 'latin', which comes with the plugin" in done.stderr


def test_a_character_that_the_terminal_lacks_is_shown_as_its_escape(
    outside_environment: dict[str, str], alphabet: Callable[..., str]
) -> None:
    # After ~ come the bytes 7F and 80; the second is no character and becomes U+FFFD, which Latin-1 does not have.
    command = [*KAMINARI, "run", "--model", alphabet(last="\xff"), "--no-compile", "--max-tokens", "2", "~"]
    environment = {**outside_environment, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.stdout, done.returncode) == ("\x7f\\ufffd\n", 0)


def test_pictures_in_the_environment_are_separated_as_paths(outside_registry: Registry) -> None:
    command = ["run", "--model", "alphabet", "--checkpoint", "latin", "x"]
    done = CliRunner().invoke(
        program(outside_registry), command, env={"KAMINARI_IMAGE": f"no such.png{os.pathsep}b.png"}
    )
    assert "the picture 'no such.png' cannot be read" in done.stderr


def test_progress_is_drawn_on_a_terminal_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    with os.fdopen(ours, "rb", buffering=0) as screen, os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with terminal_progress() as progress:
            progress("load", 1, 4)
            progress("load", 4, 4)
            progress("compile", 0, 3)
        terminal.flush()
        drawn = ""
        while select.select([screen], [], [], 0.5)[0]:
            drawn += screen.read(65536).decode()
    assert "load:   0%" in drawn
    assert "| 0/4 [" in drawn
    assert "compile:   0%" in drawn
    assert "\n" not in drawn
    with io.StringIO() as file:
        monkeypatch.setattr(sys, "stderr", file)
        with terminal_progress() as progress:
            progress("load", 1, 4)
        assert file.getvalue() == ""


def test_run_prints_one_json_object(run: Run) -> None:
    done = run("--checkpoint", "latin", "--json", "w")
    reply = json.loads(done.stdout)
    assert list(reply) == ["text", "finish_reason", "finish_detail", "usage", "timings", "saw"]
    assert (reply["text"], reply["finish_reason"], reply["saw"]) == ("xyz", "stop", [])
    # x, y, z and the end token.
    assert reply["usage"] == {"prompt_tokens": 1, "image_tokens": 0, "completion_tokens": 4}
    assert reply["timings"]["total"] > 0
    assert done.stdout.count("\n") == 1


def test_a_reply_that_a_limit_cut_says_so_on_stderr(run: Run) -> None:
    done = run("--checkpoint", "latin", "--max-tokens", 2, "w")
    assert (done.stdout, done.exit_code) == ("xy\n", 0)
    assert done.stderr == "note: the reply was cut after 2 tokens (--max-tokens)\n"
    done = run("--checkpoint", "latin", "--max-length", 3, "w")
    assert done.stderr == "note: the reply was cut after 3 tokens (--max-length)\n"


def test_stop_texts_end_the_reply(run: Run) -> None:
    assert run("--checkpoint", "latin", "--stop", "?", "--stop", "yz", "w").stdout == "x\n"


def test_a_system_message_comes_first(run: Run) -> None:
    # The model sees one text after the other, so the last letter is the prompt's.
    assert run("--checkpoint", "latin", "--system", "a", "x").stdout == "yz\n"
    assert json.loads(run("--checkpoint", "latin", "--json", "--system", "abc", "x").stdout)["usage"][
        "prompt_tokens"
    ] == len("abcx")


def test_a_task_stands_for_its_prompt(run: Run) -> None:
    assert run("--checkpoint", "latin", "--task", "whole").stdout == "bcdefghijklmnopqrstuvwxyz\n"


def test_the_checkpoints_sampling_is_taken_only_when_asked_for(run: Run, alphabet: Callable[..., str]) -> None:
    options = ["--checkpoint", alphabet(dice=True), "--max-tokens", 30]
    greedy = run(*options, "x").stdout
    # Every letter is equally likely, and the first of equals is taken.
    assert greedy == "a" * 30 + "\n"
    drawn = run(*options, "--sampling", "checkpoint", "x").stdout
    assert len(set(drawn)) > 5
    assert run(*options, "--temperature", 0.7, "--seed", 1, "x").stdout == drawn
    assert run(*options, "--sampling", "checkpoint", "--seed", 2, "x").stdout != drawn
    assert run(*options, "--sampling", "checkpoint", "--temperature", 0, "x").stdout == greedy
    assert run(*options, "--temperature", 1, "--top-k", 1, "x").stdout == greedy


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--checkpoint", "latin"], 2, "there is nothing to answer: give a PROMPT, or pictures with --image"),
        (["--checkpoint", "latin", " "], 2, "there is nothing to answer: the PROMPT is empty"),
        (["--checkpoint", "latin", "ab\udcff"], 2, "the PROMPT is not valid Unicode (character 2)"),
        (["--checkpoint", "latin", "--system", "\udcff", "x"], 2, "--system is not valid Unicode (character 0)"),
        (["--checkpoint", "latin", "--stop", "\udcff", "x"], 2, "--stop is not valid Unicode (character 0)"),
        (["--checkpoint", "latin", "--task", "whole", "x"], 2, "either --task or a PROMPT, not both"),
        (["--checkpoint", "latin", "--task", "whale"], 2, "no task of alphabet 'whale'. Did you mean 'whole'?"),
        (["--checkpoint", "latin", "--image", "no/such.png"], 2, "no task of alphabet 'ocr'"),
        (["--checkpoint", "latin", "--image", "no/such.png", "x"], 2, "'no/such.png' cannot be read: No such file"),
        (["--checkpoint", "latin", "--image", ".", "x"], 2, "'.' cannot be read: Is a directory"),
        (["--checkpoint", "latin", "--image", __file__, "x"], 1, "the model 'alphabet' takes no pictures"),
        (["--checkpoint", "lattin", "x"], 2, "'lattin'. Did you mean 'latin'?"),
        (["--checkpoint", "latin", "--scheduler", "magic", "x"], 2, "no scheduler 'magic'. There are: continuous"),
        (["--checkpoint", "latin", "--cache", "sttic", "x"], 2, "no cache 'sttic'. Did you mean 'static'?"),
        (["--checkpoint", "latin", "--quantizer", "int3", "x"], 2, "no quantizer 'int3'"),
        (["--checkpoint", "latin", "--slots", "0", "x"], 2, "slots is 0, but must be at least 1"),
        (["--checkpoint", "latin", "--device", "gpu", "x"], 2, "device is 'gpu'; choose auto, cpu, cuda or cuda:N"),
        (["--checkpoint", "latin", "--dtype", "int8", "x"], 2, "'int8' is not one of 'auto', 'float32'"),
        (["--checkpoint", "latin", "--temperature", "-1", "x"], 2, "-1.0 is not in the range x>=0"),
        (["--checkpoint", "latin", "--temperature", "nan", "x"], 2, "'nan' is not a number"),
        (["--checkpoint", "latin", "--max-tokens", "many", "x"], 2, "'many' is not a valid integer"),
    ],
    ids=lambda value: None if isinstance(value, int | str) else " ".join(value[2:]) or "nothing",
)
def test_what_cannot_be_used_is_one_clear_line(run: Run, arguments: list[str], code: int, message: str) -> None:
    done = run(*arguments)
    assert message in done.stderr
    assert done.exit_code == code
    assert done.stdout == ""
    assert isinstance(done.exception, SystemExit)


def test_an_unknown_model_names_what_there_is(kaminari: Run) -> None:
    done = kaminari("run", "--model", "alphabeth", "x")
    assert done.stderr == "Error: There is no model 'alphabeth'. Did you mean 'alphabet'? There are: alphabet.\n"
    assert done.exit_code == 2


def test_a_plugins_command_has_its_errors_shown_the_same_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint

    (tmp_path / "failing_command.py").write_text(
        "import click\nfrom kaminari_core.errors import EngineError\nfrom kaminari_core.hookspecs import hookimpl\n"
        "@hookimpl\ndef kaminari_commands(cli):\n"
        "    @cli.command()\n    def fail(): raise EngineError('the card is gone')\n"
        "    @cli.command()\n    def wait(): raise KeyboardInterrupt\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    cli = program(load_registry([EntryPoint("failing", "failing_command", "kaminari")]))
    done = CliRunner().invoke(cli, ["fail"])
    assert (done.stderr, done.exit_code) == ("Error: the card is gone\n", 1)
    done = CliRunner().invoke(cli, ["wait"])
    assert (done.stderr, done.exit_code) == ("interrupted\n", 130)


@pytest.fixture
def endless(outside_environment: dict[str, str], alphabet: Callable[..., str]) -> Iterator[subprocess.Popen[bytes]]:
    """A run that prints a letter every 20 ms for as long as it is let, with the first letter already read."""
    checkpoint = alphabet(dice=True, pause=0.02)
    command = [*KAMINARI, "run", "--model", checkpoint, "--no-compile", "--max-tokens", "500", "x"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=outside_environment) as running:
        assert running.stdout is not None
        assert running.stdout.read(1) == b"a"
        yield running
        running.kill()


def test_an_interrupted_run_exits_130_without_a_traceback(endless: subprocess.Popen[bytes]) -> None:
    endless.send_signal(signal.SIGINT)
    _, errors = endless.communicate(timeout=30)
    assert endless.returncode == 130
    assert errors == b"interrupted\n"


def test_a_reader_that_leaves_ends_the_run_quietly(endless: subprocess.Popen[bytes]) -> None:
    assert endless.stdout is not None
    assert endless.stderr is not None
    endless.stdout.close()
    assert endless.wait(timeout=30) == 141
    assert endless.stderr.read() == b""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no device that is always full")
def test_a_full_disk_is_one_clear_line(outside_environment: dict[str, str]) -> None:
    command = [*KAMINARI, "models"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, env=outside_environment, text=True)
    assert done.stderr == "Error: the output cannot be written: No space left on device\n"
    assert done.returncode == 1


def test_the_length_of_the_cache_suits_the_request() -> None:
    from kaminari_core.commands_run import needed_length
    from kaminari_core.flow import ImagePart, Message, TextPart

    message = Message("user", (ImagePart(b""), ImagePart(b""), TextPart("two words")))
    config = EngineConfig(visual_tokens=256, max_tokens=300)
    # Room for the template 256, two pictures of 256 and their two marks, 9 bytes, 300 new tokens: 1081.
    assert needed_length([message], config) == 2048
    assert needed_length([Message("user", (TextPart("x" * 200),))], dataclasses.replace(config, max_tokens=56)) == 512
