"""The kernels under AddressSanitizer, on shapes and values that nobody chose."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from kaminari_core.kernels import library

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_no_kernel_reads_or_writes_beyond_its_buffers(tmp_path: Path) -> None:
    if library.unsupported():
        pytest.skip("one path only on this processor")
    sources = [file for file in sorted(library.SOURCES.glob("*.cpp")) if file.name != "operators.cpp"]
    program = tmp_path / "fuzz"
    flags = ["-std=c++20", "-O1", "-g", "-w", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    command = [library.find_compiler().command, *flags, f"-I{library.SOURCES}"]
    built = subprocess.run(
        [*command, *map(str, sources), str(Path(__file__).with_name("fuzz.cpp")), "-o", str(program)],
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr[-3000:]
    done = subprocess.run([str(program), "150"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "instruction set 0: 150 rounds" in done.stdout
