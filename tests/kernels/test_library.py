"""Compiling, keeping and loading the library, and what happens where it cannot be compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kaminari_core.config import EngineConfig
from kaminari_core.errors import UsageError
from kaminari_core.kernels import library
from kaminari_core.kernels.adoption import choose
from kaminari_core.progress import silent

CPU = torch.device("cpu")
LOAD = """
import logging, sys
logging.basicConfig(level="INFO", stream=sys.stdout)
from kaminari_core.kernels import library
library.load(lambda *done: print(*done))
print(library.loaded(), library.instructions())
"""
FAIL = """
import logging, torch
logging.basicConfig(level="WARNING")
from kaminari_core.errors import UsageError
from kaminari_core.kernels.adoption import choose
cpu = torch.device("cpu")
print(choose("auto", cpu, lambda *done: None))
try:
    choose("own", cpu, lambda *done: None)
except UsageError as error:
    logging.error(error)
"""


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KAMINARI_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("kernels")
def test_the_operators_accept_what_torch_asks_of_them() -> None:
    """Schema, shapes without data, and tracing: torch's own check of an operator."""
    ops = torch.ops.kaminari
    codes, scales = torch.zeros(16 * 64, dtype=torch.uint8), torch.ones(32, dtype=torch.bfloat16)
    zeros, cache = torch.full((32,), 8, dtype=torch.uint8), torch.randn(3, 2, 9, 32)
    parts = (codes, scales, zeros)
    rows = torch.randint(0, 16, (3, 128), dtype=torch.uint8)
    small = (torch.ones(3, 2, dtype=torch.bfloat16), torch.zeros(3, 2, dtype=torch.uint8))
    for operator, arguments in (
        (ops.linear_codes, (torch.randn(3, 128), *parts, 9, 64, 4, 8)),
        (ops.linear_bf16, (torch.randn(3, 64).bfloat16(), torch.randn(9, 64).bfloat16())),
        (ops.decode_attention, (torch.randn(2, 1, 4, 32), cache, cache.clone(), torch.tensor([[3], [8]]))),
        (ops.dequantize_codes, (*parts, 9, 128, 64, 4, torch.empty(9, 128))),
        (ops.pack_codes, (rows, *small, 2, 64, 4, *parts)),
    ):
        torch.library.opcheck(operator.default, arguments)


def test_a_library_is_named_by_what_it_is_made_of() -> None:
    compiler = library.find_compiler()
    same, other = library.library_path(compiler), library.library_path(library.Compiler("g++", "another version"))
    assert library.library_path(compiler) == same
    assert same.parent != other.parent


def test_a_compiler_that_is_not_there_is_said_so() -> None:
    with pytest.raises(library.BuildError, match=r"no C\+\+ compiler \(icpc-9\)"):
        library.find_compiler({"CXX": "icpc-9"})
    with pytest.raises(library.BuildError, match="install g"):
        library.find_compiler({"PATH": "/nowhere"})


def test_where_compiling_fails_torch_serves_and_the_reason_is_told(empty_cache: Path) -> None:
    if library.unsupported():
        pytest.skip("nothing is compiled on this processor")
    # In a process of its own: in this one they are loaded, and need no compiler any more.
    done = subprocess.run(
        [sys.executable, "-c", FAIL], capture_output=True, text=True, env={**os.environ, "CXX": "false"}, timeout=250
    )
    assert done.stdout == "aten\n", done.stderr
    assert done.stderr.count("WARNING") == 1
    assert "could not be compiled, torch's are used: " in done.stderr
    assert "kernels is own, but there are none here: " in done.stderr
    assert "false failed with exit code 1: it said nothing; use --kernels auto" in done.stderr
    # Nothing half made is left.
    assert {file.name for file in (empty_cache / "kernels").rglob("*") if file.is_file()} == {"lock"}


def test_a_cache_that_cannot_be_written_is_a_reason_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("KAMINARI_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(library.BuildError, match=r"cannot be used: .*Not a directory"):
        library.ensure(silent)


def test_nothing_is_compiled_for_what_needs_no_kernels(empty_cache: Path) -> None:
    assert choose("aten", CPU, silent) == "aten"
    assert choose("plain", CPU, silent) == "plain"
    assert choose("auto", torch.device("cuda"), silent) == "aten"
    with pytest.raises(UsageError, match="they are for CPUs, and the device is cuda"):
        choose("own", torch.device("cuda"), silent)
    assert list(empty_cache.iterdir()) == []


def test_settings_that_name_nothing_are_refused() -> None:
    with pytest.raises(UsageError, match="choose auto, own, aten or plain"):
        EngineConfig(kernels="fast")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="choose 8 or 16"):
        EngineConfig(activation_bits=4)


@pytest.mark.slow
def test_two_processes_that_come_at_once_compile_once(empty_cache: Path) -> None:
    if library.unsupported():
        pytest.skip("nothing is compiled on this processor")
    started = [
        subprocess.Popen([sys.executable, "-c", LOAD], stdout=subprocess.PIPE, text=True, env={**os.environ})
        for _ in range(2)
    ]
    said = [process.communicate(timeout=900)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    for each in said:
        assert "True " in each
    # Only one of them had progress to tell.
    assert sorted("kernels compiled into" in each for each in said) == [False, True]
    assert sorted("kernels 8 8" in each for each in said) == [False, True]
