"""How much memory there is: sizes as people write them, and what the system's own files say."""

from __future__ import annotations

from pathlib import Path

import pytest

from kaminari_core.errors import UsageError
from kaminari_core.fit.memory import free_on_cpu, given, parse_size

GIB = 2**30


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("6g", 6 * GIB), ("6G", 6 * GIB), ("6", 6 * GIB), ("6GB", 6 * GIB), ("6 GiB", 6 * GIB), ("5.5g", 11 * GIB // 2),
        ("6144m", 6 * GIB), ("1t", 1024 * GIB), ("512k", 512 * 1024),
    ],
)  # fmt: skip
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size
    assert given(text).bytes == size


@pytest.mark.parametrize("text", ["", "g", "six", "-6g", "6x", "0g", "6g4"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="give a size such as 6g"):
        parse_size(text)


def machine(root: Path, **files: str) -> Path:
    """A root directory with the files of proc and sys; a double underscore stands for a slash."""
    written = {"proc__meminfo": "MemTotal: 9000000 kB\nMemAvailable: 8000000 kB\n", **files}
    for name, text in written.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_a_machine_without_limits(tmp_path: Path) -> None:
    budget = free_on_cpu(machine(tmp_path))
    assert budget is not None
    assert budget.bytes == 8_000_000 * 1024
    assert not budget.whole


def test_the_tightest_control_group_counts(tmp_path: Path) -> None:
    stat = "anon 5\ninactive_file 1000\n"
    root = machine(
        tmp_path,
        proc__self__cgroup="0::/outer/inner\n",
    )
    for folder, limit, used in (("outer", 3 * GIB, GIB), ("outer/inner", "max", 7)):
        (root / "sys/fs/cgroup" / folder).mkdir(parents=True, exist_ok=True)
        for name, value in (("max", limit), ("current", used), ("stat", stat)):
            (root / "sys/fs/cgroup" / folder / f"memory.{name}").write_text(str(value))
    budget = free_on_cpu(root)
    # What the group uses is gone, but file pages that nobody needs can be given back.
    assert budget is not None
    assert budget.bytes == 2 * GIB + 1000


def test_a_control_group_of_the_first_version(tmp_path: Path) -> None:
    root = machine(tmp_path, proc__self__cgroup="5:cpu:/x\n7:memory:/docker/id\n")
    # Inside a container, the path is the host's, and the files are at the top.
    top = root / "sys/fs/cgroup/memory"
    top.mkdir(parents=True)
    (top / "memory.limit_in_bytes").write_text(str(GIB))
    (top / "memory.usage_in_bytes").write_text("500")
    (top / "memory.stat").write_text("total_inactive_file 100\n")
    budget = free_on_cpu(root)
    assert budget is not None
    assert budget.bytes == GIB - 400


def test_a_system_that_does_not_tell(tmp_path: Path) -> None:
    assert free_on_cpu(tmp_path) is None


def test_this_machine_tells() -> None:
    budget = free_on_cpu()
    assert budget is not None
    assert budget.bytes > 0
