"""What a user installs: the wheels alone, in a fresh environment, answering the client that people use."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from difflib import SequenceMatcher
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("kaminari_core", "kaminari_http", "kaminari_qwen3vl", "kaminari_glmocr")

pytestmark = pytest.mark.slow


def run(*command: str | Path, env: dict[str, str] | None = None, cwd: Path | None = None) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, env=env, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def likeness(text: str) -> float:
    """How much of the sample receipt was read, from 0 to 1."""
    return SequenceMatcher(
        None, text.strip(), (ROOT / "assets" / "receipt.txt").read_text().strip(), autojunk=False
    ).ratio()


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    for package in PACKAGES:
        run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT / package)
    return folder


@pytest.fixture(scope="module")
def installed(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a fresh environment with kaminari-qwen3vl, and with what only this test needs: the openai client."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", folder)
    pip = [
        folder / "bin" / "python",
        "-m",
        "pip",
        "install",
        "-q",
        "-c",
        ROOT / "constraints.txt",
        "--find-links",
        wheels,
    ]
    run(*pip, "kaminari-qwen3vl")
    run(*pip, "openai")
    return folder / "bin"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Nothing of this repository or of the tests' own environment."""
    names = ("PATH", "LANG", "TMPDIR", "KAMINARI_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
    kept = {name: os.environ[name] for name in names if name in os.environ}
    return {**kept, "HOME": str(tmp_path_factory.mktemp("home")), "HF_HUB_OFFLINE": "1"}


def test_the_bundled_checkpoint_is_in_the_wheel(wheels: Path) -> None:
    with zipfile.ZipFile(next(wheels.glob("kaminari_qwen3vl-*.whl"))) as wheel:
        names = set(wheel.namelist())
    shipped = {
        str(path.relative_to(ROOT / "kaminari_qwen3vl"))
        for path in (ROOT / "kaminari_qwen3vl/kaminari_qwen3vl/tiny").iterdir()
    }
    assert {"kaminari_qwen3vl/tiny/config.json", "kaminari_qwen3vl/tiny/model.safetensors"} <= shipped
    assert shipped <= names
    assert "kaminari_qwen3vl/py.typed" in names


def test_an_outside_plugin_is_found_when_pip_has_installed_it(environment: dict[str, str], tmp_path: Path) -> None:
    fixture = ROOT / "tests" / "fixtures" / "outside_plugin"
    run(
        sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", tmp_path, fixture
    )
    program = [sys.executable, "-c", "from kaminari_core.cli import main; main()"]
    environment = {**environment, "PYTHONPATH": str(tmp_path)}
    assert "outside  outside-plugin 0.3.0" in run(*program, "plugins", env=environment)
    command = ["run", "--model", "alphabet", "--checkpoint", "latin", "--no-compile", "w"]
    assert run(*program, *command, env=environment) == "xyz\n"


def test_the_installed_program_reads_the_receipt(installed: Path, environment: dict[str, str], tmp_path: Path) -> None:
    listed = run(installed / "kaminari", "plugins", "--json", env=environment, cwd=tmp_path)
    assert json.loads(listed)["broken"] == []
    command = [
        "run",
        "--model",
        "qwen3vl",
        "--checkpoint",
        "tiny",
        "--no-compile",
        "--image",
        ROOT / "assets" / "receipt.png",
    ]
    text = run(installed / "kaminari", *command, env=environment, cwd=tmp_path)
    assert likeness(text) > 0.9


@pytest.fixture
def address(installed: Path, environment: dict[str, str], tmp_path: Path) -> Iterator[str]:
    """A server on a free port, for as long as a test needs it."""
    command = [
        str(installed / "kaminari"),
        "serve",
        "--model",
        "qwen3vl",
        "--checkpoint",
        "tiny",
        "--no-compile",
        "--port",
        "0",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=tmp_path) as server:
        assert server.stdout is not None
        line = server.stdout.readline()
        yield line.rpartition(" at ")[2].strip()
        server.terminate()
        assert server.wait(timeout=60) == 0


def test_the_installed_server_answers_the_openai_client(
    installed: Path, environment: dict[str, str], tmp_path: Path, address: str
) -> None:
    code = """
import base64, sys
from openai import OpenAI
address, picture = sys.argv[1:]
url = "data:image/png;base64," + base64.b64encode(open(picture, "rb").read()).decode()
client = OpenAI(base_url=address + "/v1", api_key="none")
content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "Read all the text in the image."}]
ask = dict(model="qwen3vl", messages=[{"role": "user", "content": content}], temperature=0)
whole = client.chat.completions.create(**ask).choices[0].message.content
parts = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**ask, stream=True) if chunk.choices]
assert whole == "".join(parts), (whole, parts)
print(whole)
"""
    text = run(
        installed / "python", "-c", code, address, ROOT / "assets" / "receipt.png", env=environment, cwd=tmp_path
    )
    assert likeness(text) > 0.9
