"""`kaminari doctor`: what is found, and the reasons for what is not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kaminari_core.kernels import library
from kaminari_core.kernels.diagnosis import diagnose
from kaminari_core.progress import silent


@pytest.mark.usefixtures("kernels")
def test_everything_is_there() -> None:
    command = [str(Path(sys.executable).with_name("kaminari")), "doctor", "--json"]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=250).stdout)
    assert found["versions"]["torch"] == torch.__version__
    assert found["compiler"]["command"] == library.find_compiler().command
    assert found["kernels"]["state"] == "loaded"
    assert found["kernels"]["instructions"] == library.instructions()
    assert Path(found["kernels"]["library"]).is_file()
    assert found["what serves"]["decode attention"] == "own kernel"
    assert found["what serves"]["4-bit weights"] == "own kernel"


def test_what_is_missing_is_shown_with_its_reason_and_nothing_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if library.unsupported():
        pytest.skip("no kernels are to be had on this processor")
    monkeypatch.setenv("KAMINARI_CACHE_DIR", str(tmp_path))
    found = diagnose(False, silent)
    assert found["kernels"]["state"] == "not compiled"
    assert "--compile does it now" in found["kernels"]["reason"]
    assert found["what serves"]["decode attention"] == "own kernel, once it is compiled"
    monkeypatch.setenv("CXX", "no-such-compiler")
    found = diagnose(True, silent)
    assert found["kernels"]["state"] == "missing"
    assert found["kernels"]["reason"] == found["compiler"]["reason"]
    assert "there is no C++ compiler (no-such-compiler); install g++" in found["compiler"]["reason"]
    assert found["what serves"]["decode attention"] == "torch"
    assert list(tmp_path.iterdir()) == []
