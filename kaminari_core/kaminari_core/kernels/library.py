"""Compiles the kernels when an engine first wants them, keeps the result, and loads it.

The seam is torch's operator registry: once a library is loaded into the process, `torch.ops.kaminari` has the operators, and
whoever wants one asks `loaded()`. The files are compiled with the compiler that `torch.compile` needs anyway, called directly:
torch's own extension loader would need ninja and setuptools on the user's machine.

A library's directory in the cache is named by everything its machine code depends on, so it is never stale; two processes that
come at once wait for each other at a file lock, and a library appears under its name only when it is whole.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kaminari_core.cache_directory import cache_directory
from kaminari_core.protocols import Progress

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "csrc"
_FLAGS = ("-std=c++20", "-O3", "-fPIC", "-fopenmp", "-fno-math-errno", "-w")
_SECONDS = 900
"""How long one file may compile."""
_HUGE = 2 * 2**20


class BuildError(Exception):
    """Why there are no kernels here; the message is for the user."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C++ compiler: how it is called, and the first line of what it says of itself."""

    command: str
    version: str


def loaded() -> bool:
    """Whether the operators are in this process."""
    return hasattr(torch.ops.kaminari, "linear_codes")


def on_large_pages(tensor: Tensor) -> Tensor:
    """The same tensor, which nobody has written to yet, on pages of 2 MiB where there are kernels and the system has some.

    Reading weights is most of a step on a CPU, and finding small pages is a good part of reading.
    """
    if tensor.device.type == "cpu" and tensor.nbytes >= _HUGE and loaded():
        torch.ops.kaminari.huge_pages(tensor, False)
    return tensor


def instructions() -> str:
    """The instruction set that the loaded kernels use: portable, avx2, avx512 or avx512bf16."""
    name: str = torch.ops.kaminari.instructions()
    return name


def unsupported() -> str | None:
    """Why kernels would not pay on this processor or system; None where they do."""
    machine = platform.machine()
    if machine not in ("x86_64", "AMD64") or platform.system() != "Linux":
        return f"they are written for x86-64 Linux, and this is {machine} {platform.system()}"
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        return "this processor has no AVX2"
    return None


def find_compiler(environment: Mapping[str, str] = os.environ) -> Compiler:
    """The compiler named by `CXX`, else g++ or clang++. Raises BuildError."""
    candidates = (environment["CXX"],) if environment.get("CXX") else ("g++", "c++", "clang++")
    for name in candidates:
        if command := shutil.which(name, path=environment.get("PATH")):
            said = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=60)
            return Compiler(command, said.stdout.partition("\n")[0])
    raise BuildError(f"there is no C++ compiler ({', '.join(candidates)}); install g++, or name one in CXX")


def library_path(compiler: Compiler) -> Path:
    """Where the library of these sources, this torch and this compiler belongs in the cache; it need not exist."""
    parts = [torch.__version__, compiler.version, platform.machine(), *_FLAGS]
    digest = hashlib.sha256("\0".join(parts).encode())
    for file in sorted(SOURCES.iterdir()):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return cache_directory() / "kernels" / digest.hexdigest()[:20] / "libkaminari.so"


def load(progress: Progress) -> None:
    """Load the kernels into this process, unless they are there; see `ensure`. Raises BuildError."""
    if loaded():
        return
    path = ensure(progress)
    try:
        with _locked(path.with_name("lock")):
            if not loaded():
                torch.ops.load_library(path)  # type: ignore[no-untyped-call]
                _register()
    except OSError as error:
        raise BuildError(f"{path} cannot be loaded: {error}") from error


def ensure(progress: Progress) -> Path:
    """The library in the cache, compiled if that was not done before.

    `progress` is told of each compiled file, under the name `kernels`. Raises BuildError.
    """
    compiler = find_compiler()
    path = library_path(compiler)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _locked(path.with_name("lock")):
            if not path.exists():
                _build(compiler, path, progress)
    except OSError as error:
        raise BuildError(f"{path.parent} cannot be used: {error}") from error
    return path


def _register() -> None:
    from kaminari_core.kernels.operators import register_shapes

    register_shapes()


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(compiler: Compiler, path: Path, progress: Progress) -> None:
    sources = sorted(SOURCES.glob("*.cpp"))
    root = Path(torch.__file__).parent
    include = [f"-I{root / 'include'}", f"-I{root / 'include' / 'torch' / 'csrc' / 'api' / 'include'}"]
    progress("kernels", 0, len(sources) + 1)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:

        def compile_one(source: Path) -> str:
            made = str(Path(folder) / f"{source.stem}.o")
            _run([compiler.command, *_FLAGS, *include, "-c", str(source), "-o", made])
            return made

        objects = []
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for made in pool.map(compile_one, sources):
                objects.append(made)
                progress("kernels", len(objects), len(sources) + 1)
        whole = Path(folder) / path.name
        libraries = [f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10"]
        _run([compiler.command, "-shared", "-fopenmp", *objects, *libraries, "-o", str(whole)])
        whole.replace(path)
    progress("kernels", len(sources) + 1, len(sources) + 1)
    logger.info("kernels compiled into %s", path)


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{command[0]} did not end within {_SECONDS} s") from error
    if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if "error" in line.lower()] or done.stderr.splitlines()
        reason = " ".join(said[:2])[:500] or "it said nothing"
        raise BuildError(f"{command[0]} failed with exit code {done.returncode}: {reason}")
