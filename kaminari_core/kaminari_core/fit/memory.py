"""How much memory there is: what a flag says, what a card or a machine has free, what a container is limited to."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from kaminari_core.errors import UsageError

_UNITS = {"": 2**30, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[kmgt]?)(?:i?b)?", re.IGNORECASE)
_NO_LIMIT = 1 << 62
"""Version 1 of the control groups writes a number near 2**63 for none."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Memory to plan for. `whole` says that the process with its libraries must fit in as well: the memory of a card or a
    machine, not what is free beside what this process has already."""

    bytes: int
    source: str
    whole: bool


def parse_size(text: str) -> int:
    """Bytes of `6g`, `6144m`, `5.5 GiB`; a bare number counts GiB. Units are powers of 1024. Raises UsageError."""
    match = _SIZE.fullmatch(text.strip())
    size = int(float(match["number"]) * _UNITS[match["unit"].lower()]) if match else 0
    if size < 1:
        raise UsageError(f"vram is {text!r}; give a size such as 6g or 6144m")
    return size


def given(text: str) -> Budget:
    """The budget that `--vram` names."""
    return Budget(parse_size(text), "--vram", whole=True)


def free_on_cpu(root: Path = Path("/")) -> Budget | None:
    """What is free on this machine, within the limit of its control group; None where the system does not tell (not Linux)."""
    try:
        lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    table = dict(line.split(":", 1) for line in lines)
    found = [Budget(int(table["MemAvailable"].split()[0]) * 1024, "free memory of this machine", whole=False)]
    found += _group_limits(root)
    return min(found, key=lambda budget: budget.bytes)


def free_on_card(index: int = 0) -> Budget | None:
    """What `nvidia-smi` says that a card has in all, without touching the card; None where there is no such program or card."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, f"--id={index}", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=10)
    if done.returncode or not done.stdout.strip().isdigit():
        return None
    return Budget(int(done.stdout) * 2**20, f"card {index}", whole=True)


def _group_limits(root: Path) -> list[Budget]:
    """The limits of this process's control group and the groups above it, less what they use and cannot give back."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            mount, limit, used, cached = "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            mount, limit = "sys/fs/cgroup/memory", "memory.limit_in_bytes"
            used, cached = "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        top = root / mount
        group = top / path.lstrip("/")
        # Inside a container the path is often that of the host, and the group's own files lie at the top.
        folders = [folder for folder in dict.fromkeys([group, *group.parents, top]) if folder.is_relative_to(top)]
        sizes = [_headroom(folder, limit, used, cached) for folder in folders]
        found += [Budget(size, "what the control group leaves", whole=False) for size in sizes if size is not None]
    return found


def _headroom(folder: Path, limit: str, used: str, cached: str) -> int | None:
    try:
        text = (folder / limit).read_text(encoding="ascii").strip()
        if text == "max" or int(text) >= _NO_LIMIT:
            return None
        usage = int((folder / used).read_text(encoding="ascii"))
        stat = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
    except (OSError, ValueError):
        return None
    return max(0, int(text) - usage + int(stat.get(cached, 0)))
