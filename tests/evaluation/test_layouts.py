"""Sets in each layout: a small one, written as the layout is published, and what is told of one that is not like that."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from kaminari_core.errors import UnknownNameError, UsageError
from kaminari_core.evaluation.sample import Sample
from kaminari_core.evaluation.sets import LAYOUTS, read_set

LINES = Path(__file__).parent.parent / "qwen3vl" / "data" / "lines"


def picture(file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (8, 8), 255).save(file)
    return file


def write(file: Path, content: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content if isinstance(content, str) else json.dumps(content))


def write_pairs(folder: Path) -> None:
    write(folder / "truths.json", {"a.png": "text", "b.png": {"text": "t", "fields": {"x": {"y": 1}}, "group": "g"}})
    picture(folder / "a.png"), picture(folder / "b.png")


def write_omnidocbench(folder: Path) -> None:
    """Blocks out of order, with one that is ignored, a header, a table, a formula and a block whose parts have the text."""
    blocks = [
        {"category_type": "text_block", "ignore": False, "order": 2, "anno_id": 1, "text": "Second"},
        {"category_type": "title", "ignore": False, "order": 1, "anno_id": 2, "text": "First"},
        {"category_type": "text_block", "ignore": True, "order": 3, "anno_id": 3, "text": "ignored"},
        {"category_type": "header", "ignore": False, "order": 4, "anno_id": 4, "text": "header"},
        {"category_type": "text_block", "ignore": False, "order": None, "anno_id": 5, "text": "nowhere"},
        {
            "category_type": "table",
            "ignore": False,
            "order": 5,
            "anno_id": 6,
            "latex": "&",
            "html": "<table><tr><td>A</td><td>B</td></tr></table>",
        },
        {"category_type": "equation_isolated", "ignore": False, "order": 6, "anno_id": 7, "latex": "$$x^2$$"},
        {
            "category_type": "text_block",
            "ignore": False,
            "order": 7,
            "anno_id": 8,
            "merge_list": [
                {"category_type": "text_block", "text": "one"},
                {"category_type": "text_block", "text": "two"},
            ],
        },
    ]
    info = {
        "page_no": 0,
        "height": 8,
        "width": 8,
        "image_path": "page.png",
        "page_attribute": {"data_source": "book", "language": "english"},
    }
    write(folder / "OmniDocBench.json", [{"layout_dets": blocks, "page_info": info, "extra": {"relation": []}}])
    picture(folder / "images" / "page.png")


def write_ocrbench(folder: Path) -> None:
    entries = [
        {"dataset_name": "IIIT5K", "type": "Regular Text Recognition", "question": "what is it?", "answers": "CENTRE",
         "image_path": "IIIT5K/test_1.png"},
        {"dataset_name": "docVQA", "type": "Doc-oriented VQA", "question": "how much?", "answers": ["5", "5.00"],
         "image_path": "IIIT5K/test_1.png"},
    ]  # fmt: skip
    write(folder / "OCRBench.json", entries)
    picture(folder / "OCRBench_Images" / "IIIT5K" / "test_1.png")


def write_ocrbench_lines(folder: Path) -> None:
    write_ocrbench(folder)
    entries = json.loads((folder / "OCRBench.json").read_text())
    (folder / "OCRBench.json").unlink()
    write(folder / "bench.jsonl", "\n".join(json.dumps(entry) for entry in entries) + "\n\n")


def write_funsd(folder: Path) -> None:
    def entity(number: int, label: str, linking: list[list[int]], *words: tuple[str, list[int]]) -> dict[str, object]:
        text = " ".join(word for word, _ in words)
        boxes = [{"box": box, "text": word} for word, box in words]
        return {"id": number, "text": text, "box": [0, 0, 9, 9], "label": label, "linking": linking, "words": boxes}

    form = [
        entity(0, "answer", [[1, 0]], ("14", [60, 10, 70, 20]), ("March", [72, 11, 90, 21])),
        entity(1, "question", [[1, 0]], ("Date:", [10, 10, 50, 20])),
        entity(2, "question", [], ("Fax:", [10, 40, 50, 50])),
        entity(3, "header", [], ("FORM", [10, 0, 50, 8])),
    ]
    write(folder / "training_data" / "annotations" / "00040534.json", {"form": form})
    picture(folder / "training_data" / "images" / "00040534.png")


def write_sroie(folder: Path) -> None:
    lines = "72,25,326,25,326,64,72,64,TAN WOON YANN\n10,100,90,100,90,120,10,120,TOTAL, RM\n95,101,120,101,120,119,95,119,9.00\n"
    write(folder / "box" / "000.csv", lines)
    write(folder / "key" / "000.json", {"company": "TAN WOON YANN", "total": "9.00", "date": "", "address": "X"})
    picture(folder / "img" / "000.jpg")


def write_cord(folder: Path) -> None:
    def word(text: str, left: int, top: int, *, key: int = 0) -> dict[str, object]:
        quad = {
            "x1": left,
            "y1": top,
            "x2": left + 9,
            "y2": top,
            "x3": left + 9,
            "y3": top + 9,
            "x4": left,
            "y4": top + 9,
        }
        return {"quad": quad, "is_key": key, "row_id": 1, "text": text}

    lines = [
        {"words": [word("Kopi", 10, 10), word("Susu", 20, 10)], "category": "menu.nm", "group_id": 3, "sub_group_id": 0},
        {"words": [word("15.000", 60, 11)], "category": "menu.price", "group_id": 3, "sub_group_id": 0},
        {"words": [word("Roti", 10, 30)], "category": "menu.nm", "group_id": 5, "sub_group_id": 0},
        {"words": [word("TOTAL", 10, 50, key=1), word("15.000", 60, 50)], "category": "total.total_price", "group_id": 7,
         "sub_group_id": 0},
    ]  # fmt: skip
    annotation = {"dontcare": [], "valid_line": lines, "meta": {}, "roi": {}, "repeating_symbol": []}
    write(folder / "test" / "json" / "receipt_00000.json", annotation)
    picture(folder / "test" / "image" / "receipt_00000.png")


WRITTEN: dict[str, tuple[str, Callable[[Path], None], list[Sample]]] = {
    "pairs": (
        "pairs",
        write_pairs,
        [Sample("a.png", Path("a.png"), "text"), Sample("b.png", Path("b.png"), "t", fields={"x.y": "1"}, group="g")],
    ),
    "omnidocbench": (
        "omnidocbench",
        write_omnidocbench,
        [
            Sample(
                "page.png",
                Path("images/page.png"),
                "First\nSecond\nA B\n$$x^2$$\none\ntwo",
                tables=("<table><tr><td>A</td><td>B</td></tr></table>",),
                group="book",
            )
        ],
    ),
    "ocrbench": (
        "ocrbench",
        write_ocrbench,
        [
            Sample(
                "0000 IIIT5K/test_1.png",
                Path("OCRBench_Images/IIIT5K/test_1.png"),
                question="what is it?",
                answers=("CENTRE",),
                group="Regular Text Recognition",
            ),
            Sample(
                "0001 IIIT5K/test_1.png",
                Path("OCRBench_Images/IIIT5K/test_1.png"),
                question="how much?",
                answers=("5", "5.00"),
                group="Doc-oriented VQA",
            ),
        ],
    ),
    "funsd": (
        "funsd",
        write_funsd,
        [
            Sample(
                "training_data/00040534.png",
                Path("training_data/images/00040534.png"),
                "FORM\nDate: 14 March\nFax:",
                fields={"Date:": "14 March"},
                group="training_data",
            )
        ],
    ),
    "sroie": (
        "sroie",
        write_sroie,
        [
            Sample(
                "000.jpg",
                Path("img/000.jpg"),
                "TAN WOON YANN\nTOTAL, RM 9.00",
                fields={"company": "TAN WOON YANN", "total": "9.00", "address": "X"},
            )
        ],
    ),
    "cord": (
        "cord",
        write_cord,
        [
            Sample(
                "test/receipt_00000.png",
                Path("test/image/receipt_00000.png"),
                "Kopi Susu 15.000\nRoti\nTOTAL 15.000",
                fields={
                    "menu[0].nm": "Kopi Susu",
                    "menu[0].price": "15.000",
                    "menu[1].nm": "Roti",
                    "total.total_price": "15.000",
                },
                group="test",
            )
        ],
    ),
}
WRITTEN["ocrbench lines"] = ("ocrbench", write_ocrbench_lines, WRITTEN["ocrbench"][2])


def test_every_layout_is_tested() -> None:
    assert {name for name, _, _ in WRITTEN.values()} == set(LAYOUTS)


@pytest.mark.parametrize("case", WRITTEN)
def test_a_set_in_each_layout(tmp_path: Path, case: str) -> None:
    name, written, expected = WRITTEN[case]
    written(tmp_path)
    found = read_set(tmp_path)
    assert found == read_set(tmp_path, name)
    assert [
        Sample(
            sample.name, sample.file.relative_to(tmp_path), sample.text, sample.question, sample.answers, sample.fields,
            sample.tables, sample.group,
        )
        for sample in found
    ] == expected  # fmt: skip
    # The pictures belong to no other layout.
    for other in LAYOUTS.keys() - {name}:
        with pytest.raises(UsageError, match="has no pages in a layout that is known"):
            read_set(tmp_path, other)


def test_truths_beside_the_pictures(tmp_path: Path) -> None:
    for name in ("a", "b", "c", "d"):
        picture(tmp_path / f"{name}.png")
    write(tmp_path / "a.txt", "one\ntwo\n")
    write(tmp_path / "b.json", {"question": "sum?", "answers": "5"})
    write(tmp_path / "c.json", {"total": 5, "items": [{"name": "tea"}]})
    write(tmp_path / "notes.txt", "not a page")
    assert read_set(tmp_path) == [
        Sample("a.png", tmp_path / "a.png", "one\ntwo\n"),
        Sample("b.png", tmp_path / "b.png", question="sum?", answers=("5",)),
        Sample("c.png", tmp_path / "c.png", fields={"total": "5", "items[0].name": "tea"}),
    ]


def test_the_held_out_lines_are_a_set() -> None:
    assert len(read_set(LINES)) == len(list(LINES.glob("*.png")))


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("notes.txt", "x", "has no pages in a layout that is known: omnidocbench"),
        ("truths.json", "{", "is no JSON"),
        ("truths.json", '["a"]', "must be a JSON object"),
        ("truths.json", "{}", "has no pages, though it is laid out as pairs"),
        ("truths.json", '{"gone.png": "x"}', "names 'gone.png', which is not there"),
        ("truths.json", '{"a.png": 5}', "must be a text or an object with text, question"),
        ("truths.json", '{"a.png": {"text": "", "colour": "red"}}', "has colour, but there is text"),
        ("OmniDocBench.json", '[{"layout_dets": []}]', "not as OmniDocBench is published: KeyError"),
        ("q.jsonl", '{"question": 1, "answers": 2, "image_path": "x"}\n{"question": 1}', "entry 1 must be an object"),
        ("q.jsonl", '{"question": 1, "answers": 2, "image_path": "x"}\n{', "line 2 is no JSON"),
        ("annotations/a.json", '{"form": []}', "has no picture: there is no a.png"),
        ("box/a.txt", "1,2,3", "has no lines: there is no b.csv"),
        ("box/b.txt", "1,2,3", "line 1 is not eight numbers and a text"),
        ("json/b.json", "{}", "not as CORD is published: KeyError"),
    ],
)
def test_what_is_no_set_is_told(tmp_path: Path, file: str, content: str, message: str) -> None:
    write(tmp_path / file, content)
    for place in ("a.png", "img/b.png", "image/b.png"):
        picture(tmp_path / place)
    with pytest.raises(UsageError, match=message):
        read_set(tmp_path)


def test_an_unknown_layout_names_those_there_are() -> None:
    with pytest.raises(UnknownNameError, match="choose one of: omnidocbench, funsd, cord, sroie, pairs, ocrbench"):
        read_set(LINES, "coco")
