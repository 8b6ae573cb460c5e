"""From paths to files, and which of their pages are wanted."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from kaminari_core.documents.selection import PageSelection
from kaminari_core.documents.sources import find_sources
from kaminari_core.errors import DocumentError, RequestError, UsageError
from tests.documents.files import encode, pdf, sheet

PNG = encode(Image.new("L", (9, 9)))


@pytest.fixture
def scans(tmp_path: Path) -> Path:
    """A folder of pages, in which other things lie as well."""
    files = {
        "page10.png": PNG, "page2.png": PNG, "b/page1.pdf": pdf(sheet()), "no-suffix": PNG, "damaged.tif": b"nothing",
        "notes.txt": b"hello", ".hidden.png": PNG, "b/.hidden/x.png": PNG, "page.html": b"<html>",
    }  # fmt: skip
    for name, data in files.items():
        (tmp_path / "scans" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "scans" / name).write_bytes(data)
    return tmp_path / "scans"


def test_a_folder_in_the_order_of_people(scans: Path) -> None:
    found = find_sources([str(scans)])
    keys = ["b/page1.pdf", "damaged.tif", "no-suffix", "page2.png", "page10.png"]
    assert [source.key for source in found.sources] == keys
    assert [source.path for source in found.sources] == [scans / key for key in keys]
    assert sorted(Path(path).name for path in found.left_out) == ["notes.txt", "page.html"]


def test_files_and_patterns(scans: Path) -> None:
    assert [each.key for each in find_sources([str(scans / "**/page*.p*")]).sources] == [
        "b/page1.pdf",
        "page2.png",
        "page10.png",
    ]
    # A file that is named is taken whatever it is, and once.
    named = find_sources([str(scans / "notes.txt"), str(scans / "page2.png"), str(scans / "page*.png")])
    assert [each.key for each in named.sources] == ["notes.txt", "page2.png", "page10.png"]


def test_what_is_not_there_is_named(scans: Path) -> None:
    (scans / "empty").mkdir()
    for path, words in (
        ("nothing.png", "no file or folder"),
        ("*.bmp", "matches no file"),
        ("empty", "nothing to read"),
    ):
        with pytest.raises(UsageError, match=words):
            find_sources([str(scans / path)])
    (scans / "b" / "page2.png").write_bytes(PNG)
    with pytest.raises(UsageError, match=r"would both be written as .page2\.png.; give the folder that holds both"):
        find_sources([str(scans / "page2.png"), str(scans / "b" / "page2.png")])
    assert len(find_sources([str(scans)]).sources) == 6


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("1-3,7", [1, 2, 3, 7]), ("7,1", [1, 7]), ("4-", [4, 5, 6, 7, 8]), (" 2 , 2-3 ", [2, 3]), ("8-99", [8])],
)
def test_pages(text: str, numbers: list[int]) -> None:
    selection = PageSelection.parse(text)
    assert selection.numbers(8, "file") == numbers
    assert PageSelection.parse(str(selection)) == selection


@pytest.mark.parametrize("text", ["", "0", "3-1", "-3", "a", "1,,2", "1-2-3", "1.5", "\u0661", "9" * 20])
def test_what_are_no_pages(text: str) -> None:
    with pytest.raises(RequestError, match="page numbers from 1 on") as caught:
        PageSelection.parse(text)
    assert caught.value.param == "pages"


def test_pages_that_are_not_there() -> None:
    assert PageSelection().numbers(3, "file") == [1, 2, 3]
    with pytest.raises(DocumentError, match="it has 3 pages, so none of the pages 7-9 is there") as caught:
        PageSelection.parse("7-9").numbers(3, "file")
    assert caught.value.code == "no_such_page"
