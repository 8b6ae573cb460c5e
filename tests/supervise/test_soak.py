"""A minute of everything at once; `benchmarks/soak.py --seconds 900` is the same for a quarter of an hour."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--kill-every", "12"], ["--scheduler", "microbatch"]])
def test_every_reply_is_as_it_was_alone_and_nothing_is_left(options: list[str]) -> None:
    command = [sys.executable, "benchmarks/soak.py", "--seconds", "60", *options]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=300, check=False)
    found = json.loads(done.stdout)
    assert found["wrong"] == []
    assert done.returncode == 0
    assert {"whole", "leave", "malformed", "DeadlineError"} <= set(found["requests"])
    assert (found["restarts"] > 0) == ("--kill-every" in options)
