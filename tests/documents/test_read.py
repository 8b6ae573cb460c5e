"""`kaminari read` with the bundled reader: files in, every page out once, whatever happens on the way."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from PIL import Image

from kaminari_core.cli import INTERRUPTED, program
from kaminari_core.documents.folder import JOURNAL
from kaminari_core.documents.join import likeness
from kaminari_core.registry import load_registry
from scripts.pages.kinds import draw_page
from tests.documents.files import ENCRYPTION, drawn_pdf, encode, pdf, sheet

LINES = Path("tests/qwen3vl/data/lines")
TRUTHS: dict[str, str] = json.loads((LINES / "truths.json").read_text())
FLAGS = ("--model", "qwen3vl", "--checkpoint", "tiny", "--device", "cpu", "--no-compile", "--visual-tokens", "128")
KAMINARI = [sys.executable, "-c", "from kaminari_core.cli import main; main()"]
Read = Callable[..., Result]


@pytest.fixture
def read() -> Read:
    """Runs `kaminari read` in this process, with the settings of the tests."""
    cli = program(load_registry(only=frozenset({"core", "qwen3vl"})))
    return lambda *arguments: CliRunner().invoke(cli, ["read", *FLAGS, *map(str, arguments)])


@pytest.fixture
def scans(tmp_path: Path) -> Path:
    """Three pages that can be read, a blank one, a PDF whose second page of three is broken, and two files that are no pages."""
    folder = tmp_path / "scans"
    folder.mkdir()
    for name in ("line-00.png", "line-01.png", "line-02.png"):
        shutil.copy(LINES / name, folder / name)
    (folder / "blank.png").write_bytes(encode(sheet(size=(300, 200))))
    (folder / "three.pdf").write_bytes(pdf(*map(picture, (3, 4, 5)), broken=[2]))
    (folder / "locked.pdf").write_bytes(drawn_pdf(trailer=ENCRYPTION))
    (folder / "damaged.jpg").write_bytes(b"\xff\xd8\xff")
    return folder


def picture(number: int) -> Image.Image:
    """One of the lines."""
    with Image.open(LINES / f"line-{number:02}.png") as opened:
        return opened.copy()


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """A folder of sixteen lines."""
    folder = tmp_path / "lines"
    folder.mkdir()
    for number in range(16):
        shutil.copy(LINES / f"line-{number:02}.png", folder)
    return folder


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / JOURNAL).read_text().splitlines()]


def test_a_folder_to_stdout_in_order(read: Read, scans: Path) -> None:
    done = read(scans, "--dpi", 72)
    assert done.exit_code == 1
    expected = ["==> blank.png (blank) <=="]
    for name in ("line-00.png", "line-01.png", "line-02.png"):
        expected += ["", f"==> {name} <==", TRUTHS[name]]
    for number, name in ((1, "line-03.png"), (3, "line-05.png")):
        expected += ["", f"==> three.pdf, page {number} <==", TRUTHS[name]]
    assert done.stdout.splitlines() == expected
    failed = [line for line in done.stderr.splitlines() if line.startswith("failed: ")]
    assert len(failed) == 3
    assert "failed: three.pdf, page 2: three.pdf: this page of the PDF file is damaged (Failed to load page.)" in failed
    assert any("encrypted with a password" in line for line in failed)
    assert "9 pages = 5 read + 1 blank + 3 failed; " in done.stderr.splitlines()[-1]


def test_json_says_everything(read: Read, scans: Path, tmp_path: Path) -> None:
    done = read(scans / "line-00.png", scans / "three.pdf", "--dpi", 72, "--pages", "1-2", "--format", "json")
    first, second, third = json.loads(done.stdout)
    assert (first["path"], first["page"], first["pages"], first["status"]) == ("line-00.png", 1, 1, "read")
    assert (first["text"], first["finish_detail"], first["error"]) == (TRUTHS["line-00.png"], "end_token", None)
    [line] = first["lines"]
    assert line["text"] == first["text"]
    assert 0.5 < first["confidence"]["minimum"] <= first["confidence"]["mean"] <= 1
    [piece] = first["pieces"]
    assert piece["box"] == [0, 0, *first["seen"]["size"]]
    assert first["usage"]["image_tokens"] == piece["saw"]["visual_tokens"] > 0
    assert (second["status"], second["seen"]["format"], second["pages"]) == ("read", "PDF", 3)
    assert second["pieces"][0]["saw"]["source"]["page"] == 1
    assert (third["status"], third["page"], third["text"], third["error"]["code"]) == (
        "failed",
        2,
        None,
        "damaged_page",
    )


def test_results_in_a_folder_and_what_is_done_is_not_done_again(read: Read, scans: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert read(scans, "--dpi", 72, "--out", out).exit_code == 1
    assert {path.relative_to(out).as_posix() for path in out.rglob("*")} == {
        JOURNAL, "blank.png.txt", "line-00.png.txt", "line-01.png.txt", "line-02.png.txt",
        "three.pdf.page-0001.txt", "three.pdf.page-0003.txt",
    }  # fmt: skip
    assert (out / "line-01.png.txt").read_text() == TRUTHS["line-01.png"] + "\n"
    assert (out / "blank.png.txt").read_text() == ""
    before = records(out)
    assert [(each["path"], each["page"]) for each in before] == [
        ("blank.png", 1), ("damaged.jpg", 1), ("line-00.png", 1), ("line-01.png", 1), ("line-02.png", 1),
        ("locked.pdf", 1), ("three.pdf", 1), ("three.pdf", 2), ("three.pdf", 3),
    ]  # fmt: skip

    refused = read(scans, "--out", out)
    assert (refused.exit_code, "add --resume" in refused.stderr) == (2, True)

    # The broken pages are mended, one picture has become another, one text was lost: those are read, and nothing else.
    (scans / "locked.pdf").unlink()
    (scans / "damaged.jpg").unlink()
    (out / "line-00.png.txt").unlink()
    shutil.copy(LINES / "line-07.png", scans / "line-01.png")
    (scans / "three.pdf").write_bytes(pdf(picture(3), picture(8)))
    again = read(scans, "--dpi", 72, "--out", out, "--resume")
    assert again.exit_code == 0
    assert "6 pages = 5 read + 1 blank + 0 failed (3 of them before); " in again.stderr.splitlines()[-1]
    texts = {path.name: path.read_text().strip() for path in out.glob("*.txt")}
    assert texts == {
        "blank.png.txt": "",
        "line-00.png.txt": TRUTHS["line-00.png"],
        "line-01.png.txt": TRUTHS["line-07.png"],
        "line-02.png.txt": TRUTHS["line-02.png"],
        "three.pdf.page-0001.txt": TRUTHS["line-03.png"],
        "three.pdf.page-0002.txt": TRUTHS["line-08.png"],
    }
    after = {(each["path"], each["page"]): each for each in records(out)}
    assert after["line-02.png", 1] == next(each for each in before if each["path"] == "line-02.png")
    assert ("three.pdf", 3) not in after

    # All is done: nothing is read, also not with another format, until a setting changes what would be read.
    complete = read(scans, "--dpi", 72, "--out", out, "--resume", "--format", "markdown")
    assert "(6 of them before)" in complete.stderr
    assert (out / "line-02.png.md").read_text().strip() == TRUTHS["line-02.png"]
    assert "(0" not in (changed := read(scans / "line-02.png", "--out", out, "--resume", "--no-split").stderr)
    assert "1 page = 1 read + 0 blank + 0 failed; " in changed


def test_a_run_that_is_killed_goes_on_with_nothing_lost_and_nothing_twice(
    read: Read, lines: Path, tmp_path: Path
) -> None:
    out, names = tmp_path / "out", sorted(path.name for path in lines.iterdir())
    command = [*KAMINARI, "read", *FLAGS, "--slots", "1", "--out", str(out), str(lines)]
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for_lines(out / JOURNAL, 2, lambda: running.poll() is None)
    running.send_signal(signal.SIGKILL)
    running.wait()
    done = (out / JOURNAL).read_bytes().count(b"\n")
    assert 2 <= done < len(names), "the pages that are left are many"
    # As if it had been killed in the middle of a line and of a file.
    with (out / JOURNAL).open("a") as journal:
        journal.write('{"path": "line-15.png", "page": 1, "te')
    (out / ".line-15.png.txt.partial").write_text("hal")
    again = read(lines, "--out", out, "--resume")
    assert again.exit_code == 0, again.stderr
    assert f"16 pages = 16 read + 0 blank + 0 failed ({done} of them before)" in again.stderr
    found = records(out)
    assert [each["path"] for each in found] == names
    for each in found:
        assert (out / f"{each['path']}.txt").read_text().strip() == each["text"]
    wrong = [each["path"] for each in found if each["text"] != TRUTHS[each["path"]]]
    assert len(wrong) <= 3, wrong


def wait_for_lines(file: Path, count: int, going_on: Callable[[], bool], seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not file.exists() or file.read_bytes().count(b"\n") < count:
        assert going_on(), "it ended by itself"
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def test_ctrl_c_says_what_is_done(read: Read, lines: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def interrupt() -> None:
        wait_for_lines(out / JOURNAL, 1, lambda: True)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    stopped = read(lines, "--slots", "1", "--out", out)
    thread.join()
    assert stopped.exit_code == INTERRUPTED
    found = records(out)
    assert 1 <= len(found) < 16
    last = next(line for line in stopped.stderr.splitlines() if line.startswith("interrupted: "))
    # A page that was being written when the signal came is written, but may not be counted any more.
    counts = (len(found), len(found) - 1)
    assert any(f"= {done} read + 0 blank + 0 failed; {16 - done} not done" in last for done in counts), last


def test_a_tall_receipt_is_read_in_pieces(read: Read, tmp_path: Path) -> None:
    """1 : 12, with more lines than the reader can see at once."""
    page = draw_page("long", 11).picture
    (tmp_path / "long.png").write_bytes(encode(Image.fromarray(page.pixels)))
    [record] = json.loads(read(tmp_path / "long.png", "--format", "json").stdout)
    truth, found = page.text.split("\n"), record["text"].split("\n")
    assert len(record["pieces"]) >= 5
    assert [line["text"] for line in record["lines"]] == [line for line in found if line.strip()]
    lost, doubled = compare(truth, found)
    # The reader itself misses or repeats a line of a crowded receipt now and then.
    assert len(lost) <= 3, lost
    assert len(doubled) <= 3, doubled
    assert abs(len(found) - len(truth)) <= 3
    [whole] = json.loads(read(tmp_path / "long.png", "--format", "json", "--no-split").stdout)
    assert len(whole["pieces"]) == 1
    assert len(compare(truth, whole["text"].split("\n"))[0]) > 30


def compare(truth: list[str], found: list[str]) -> tuple[list[str], list[str]]:
    """The lines of the truth that were not read, and those that were read and are not there, by likeness and in order."""
    # The longest common subsequence, where two lines are alike when more than half of their characters are.
    table = [[0] * (len(found) + 1) for _ in range(len(truth) + 1)]
    for row in range(len(truth) - 1, -1, -1):
        for column in range(len(found) - 1, -1, -1):
            near = abs(row - column) <= 12 and likeness(truth[row], found[column]) > 0.5
            table[row][column] = max(table[row + 1][column], table[row][column + 1], near + table[row + 1][column + 1])
    lost, extra, row, column = [], [], 0, 0
    while row < len(truth) and column < len(found):
        if table[row][column] == table[row + 1][column]:
            lost.append(truth[row])
            row += 1
        elif table[row][column] == table[row][column + 1]:
            extra.append(found[column])
            column += 1
        else:
            row, column = row + 1, column + 1
    return lost + truth[row:], extra + found[column:]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing.png"], "no file or folder 'nothing.png'"),
        ([LINES, "--pages", "3-1"], "page numbers from 1 on"),
        ([LINES, "--task", "nonsense"], "nonsense"),
        ([LINES, "--template", "{}"], "takes no template"),
        ([LINES, "--resume"], "name it with --out"),
        ([LINES, "--out", LINES / "truths.json"], "truths.json"),
    ],
)
def test_what_cannot_be_used_is_told_before_the_model_is_loaded(
    read: Read, arguments: list[Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kaminari_core.launch.open_engine", None)
    done = read(*arguments)
    assert (done.exit_code, words in done.stderr) == (2, True), done.stderr


def test_two_runs_do_not_write_to_one_folder(read: Read, tmp_path: Path) -> None:
    import fcntl

    folder = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    try:
        done = read(LINES / "line-00.png", "--out", tmp_path)
    finally:
        os.close(folder)
    assert (done.exit_code, "another run writes" in done.stderr) == (2, True)
