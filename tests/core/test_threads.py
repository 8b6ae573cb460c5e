"""That threads give their helpers up: seen in the operating system's own list of the process's threads."""

from __future__ import annotations

import subprocess
import sys

import pytest

COUNT = """
import os, torch
torch.set_num_threads(3)
def count():
    return len(os.listdir("/proc/self/task"))
def settle(wanted):
    import time
    until = time.monotonic() + 30
    while count() != wanted and time.monotonic() < until:
        time.sleep(0.01)
    return count()
big = torch.empty(2_000_000)
"""


def run(program: str) -> list[int]:
    done = subprocess.run([sys.executable, "-c", COUNT + program], capture_output=True, text=True, check=True)
    return [int(word) for word in done.stdout.split()]


@pytest.mark.skipif(sys.platform != "linux", reason="the threads of a process are listed by Linux")
def test_helpers_end_and_come_back() -> None:
    before, computing, released, again = run("""
from kaminari_core.threads import release_helpers
before = count()
big + 1
computing = count()
release_helpers()
released = settle(before)
big + 1
print(before, computing, released, count())
""")
    assert computing == again == before + 2
    assert released == before


@pytest.mark.skipif(sys.platform != "linux", reason="the threads of a process are listed by Linux")
def test_an_engine_that_rests_has_no_helpers() -> None:
    """Its thread and its worker are what is left of an engine that has served."""
    before, resting = run("""
from kaminari_core.cache import StaticCache
from kaminari_core.config import EngineConfig
from kaminari_core.engine import Engine
from kaminari_core.flow import Message, Request, TextPart
from kaminari_core.scheduler import ContinuousScheduler
from kaminari_core.testing import EchoModel

class Computing(EchoModel):
    def prepare(self, request):
        big + 1
        return super().prepare(request)
    def decode(self, step, cache, layer_call):
        big + 1
        return super().decode(step, cache, layer_call)

config = EngineConfig(compile=False, prepare_threads=1, max_length=256)
model = Computing(config)
engine = Engine("test", model, StaticCache(model.shape, 4, 256, model.device, model.dtype), ContinuousScheduler(config), config)
before = count()
engine.start()
for _ in range(4):
    engine.generate(Request((Message("user", (TextPart("hello"),)),)))
served = settle(before + 2)
print(before, served)
engine.close()
""")
    assert resting == before + 2
