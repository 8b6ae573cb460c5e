"""docs/plugins.md, executed: its files make a plugin that `kaminari check` finds nothing wrong with, in under 150 lines."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from kaminari_core.cli import program
from kaminari_core.registry import load_registry

TEXT = (Path(__file__).parents[2] / "docs" / "plugins.md").read_text()
SOURCES = dict(re.findall(r"^\*\*`([^`]+)`\*\*\n\n```\w+\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL))


def write(folder: Path, edit: Callable[[str], str] = lambda source: source) -> None:
    """The tutorial's files in an empty folder, the model's source edited."""
    for name, source in SOURCES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(edit(source) if name.endswith("model.py") else source)
    (folder / "kaminari_gpt2" / "__init__.py").write_text("")


@pytest.fixture
def tutorial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the tutorial, importable, and what its `pip install` would write beside it."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    metadata = tmp_path / "kaminari_gpt2-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: kaminari-gpt2\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text("[kaminari]\ngpt2 = kaminari_gpt2.plugin\n")
    write(tmp_path)
    for name in [name for name in sys.modules if name.startswith("kaminari_gpt2")]:
        monkeypatch.delitem(sys.modules, name)
    state = torch.get_rng_state()
    runpy.run_path("make_checkpoint.py")
    torch.set_rng_state(state)
    return tmp_path


def check(*options: str) -> Result:
    points = [("core", "kaminari_core.builtin"), ("gpt2", "kaminari_gpt2.plugin")]
    registry = load_registry(EntryPoint(*point, "kaminari") for point in points)
    command = ["check", "--model", "gpt2", "--checkpoint", "checkpoint", "--steps", "12", *options]
    return CliRunner().invoke(program(registry), command)


def test_it_is_short_and_complete() -> None:
    assert set(SOURCES) == {
        "pyproject.toml", "kaminari_gpt2/plugin.py", "kaminari_gpt2/model.py", "kaminari_gpt2/reference.py",
        "make_checkpoint.py",
    }  # fmt: skip
    assert sum(len(source.splitlines()) for source in SOURCES.values()) < 150


def test_its_check_is_green(tutorial: Path) -> None:
    result = check("--no-compile")
    assert result.exit_code == 0, result.output
    assert "13 passed, 0 failed, 4 not applicable" in result.output
    assert [line.split()[1] for line in result.output.splitlines() if line.startswith("n/a")] == [
        "compiled", "quantizers", "image", "memory",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("right", "wrong", "item", "message"),
    [
        ("(self.ln_2(hidden))", "(hidden)", "logits", "text is wrong from the first token"),
        ("values[index, slot], start)", "values[index, slot], 0)", "chunked prefill", "a chunk after the first"),
    ],
)
def test_what_it_invites_to_break_is_found(tutorial: Path, right: str, wrong: str, item: str, message: str) -> None:
    assert TEXT.count(right) == 1
    write(tutorial, lambda source: source.replace(right, wrong))
    result = check("--only", item)
    assert result.exit_code == 1, result.output
    assert message in result.output


def test_its_last_example_says_what_transformers_says(tutorial: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tokenizers import Tokenizer, decoders
    from transformers import GPT2LMHeadModel

    blocks = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    [example] = [block for block in blocks if "open_engine(" in block]
    exec(example, {})
    said = capsys.readouterr().out
    tokenizer = Tokenizer.from_file("checkpoint/tokenizer.json")
    prompt = torch.tensor([tokenizer.encode("To be").ids])
    stock = GPT2LMHeadModel.from_pretrained("checkpoint", local_files_only=True)
    tokens = stock.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False, pad_token_id=0
    )
    letters = [tokenizer.id_to_token(token) for token in tokens[0, prompt.shape[1] :].tolist() if token != 256]
    assert said == decoders.ByteLevel().decode(letters) + "\n"


def test_its_footprint_is_right(tutorial: Path) -> None:
    [source] = re.findall(r"^```python\n# (?=kaminari_gpt2/footprint.py\n)(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    (tutorial / "kaminari_gpt2" / "footprint.py").write_text(f"# {source}")
    plugin = tutorial / "kaminari_gpt2" / "plugin.py"
    named = 'model_types=("gpt2",),\n            footprint="kaminari_gpt2.footprint:footprint",'
    plugin.write_text(plugin.read_text().replace('model_types=("gpt2",),', named))
    result = check("--only", "memory plan")
    assert result.exit_code == 0, result.output
    assert "1 passed, 0 failed, 0 not applicable" in result.output


@pytest.mark.slow
def test_installed_by_pip_it_is_green_with_compiling_too(tmp_path: Path) -> None:
    write(tmp_path)
    environment = tmp_path / "environment"
    python = environment / "bin" / "python"
    # Its own environment over this one's packages: nothing is downloaded, and nothing here changes.
    site = Path(torch.__file__).parents[1]
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    purelib = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"],
        check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    (Path(purelib) / "outer.pth").write_text(f"import site; site.addsitedir({str(site)!r})\n")
    pip = [python, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "-e", tmp_path]
    subprocess.run(pip, check=True)
    variables = {**os.environ, "HF_HUB_OFFLINE": "1"}
    subprocess.run([python, "make_checkpoint.py"], check=True, cwd=tmp_path, env=variables)
    code = "from kaminari_core.cli import main; main()"
    command = [python, "-c", code, "check", "--model", "gpt2", "--checkpoint", "checkpoint"]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert "14 passed, 0 failed, 2 not applicable" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0
