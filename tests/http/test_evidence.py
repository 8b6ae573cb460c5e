"""What a reply says about itself, on every route, plain and streamed, through OpenAI's client where it has one."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from PIL import ExifTags, Image

from kaminari_core.config import EngineConfig
from kaminari_core.flow import ImagePart, Prepared, Request
from kaminari_core.patches import ImageProcessor
from kaminari_core.testing import EchoModel
from tests.http.serving import Running, open_engine, picture, picture_message, running

LOOP = "Prices: " + "a1 " * 100
TRIMMED = "Prices: a1"
BOX = '{"bbox_2d": [0, 0, 500, 1000], "label": "left half"}'


class SeeingEcho(EchoModel):
    """Says what the last message says, and sees its pictures as Qwen3-VL does."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.shape = dataclasses.replace(self.shape, image_unit=32)
        self._images = ImageProcessor(patch_size=16, merge_size=2, temporal_patch_size=2, mean=(0.5,) * 3, std=(0.5,) * 3,
                                      min_tokens=64, max_tokens=16_384, config=config)  # type: ignore[arg-type]  # fmt: skip

    def prepare(self, request: Request) -> Prepared:
        parts = [part for message in request.messages for part in message.parts if isinstance(part, ImagePart)]
        return dataclasses.replace(super().prepare(request), saw=self._images.see(parts)[1])


@pytest.fixture(scope="module")
def seeing() -> Iterator[Running]:
    with ExitStack() as stack:
        yield stack.enter_context(running(open_engine(SeeingEcho, max_length=2048, max_tokens=1000)))


def sideways() -> str:
    """A JPEG of 64 x 32 pixels that is to be shown turned by 90 degrees."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    file = io.BytesIO()
    Image.new("RGB", (64, 32), "red").save(file, "JPEG", exif=exif)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


def events(reply: Any) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


Said = tuple[str, dict[str, Any]]
"""A reply's text, and the report of its one choice with what was seen."""


def by_chat(server: Running, text: str, url: str | None, **fields: Any) -> Said:
    message = picture_message(url, text=text) if url else {"role": "user", "content": text}
    with server.openai() as client:
        reply = client.chat.completions.create(model="echo", messages=[message], extra_body=fields)
    return reply.choices[0].message.content or "", merged(reply.model_extra)


def by_streamed_chat(server: Running, text: str, url: str | None, **fields: Any) -> Said:
    message = picture_message(url, text=text) if url else {"role": "user", "content": text}
    with server.openai() as client:
        chunks = list(client.chat.completions.create(model="echo", messages=[message], stream=True, extra_body=fields))
    assert all("kaminari" not in (chunk.model_extra or {}) for chunk in chunks[:-1])
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks), merged(chunks[-1].model_extra)


def by_responses(server: Running, text: str, url: str | None, **fields: Any) -> Said:
    with server.openai() as client:
        reply = client.responses.create(model="echo", input=asked(text, url), extra_body=fields)
    assert reply.status == "completed"
    return reply.output_text, merged(reply.model_extra)


def by_streamed_responses(server: Running, text: str, url: str | None, **fields: Any) -> Said:
    said, last = "", None
    with server.openai() as client:
        for event in client.responses.create(model="echo", input=asked(text, url), stream=True, extra_body=fields):
            said += event.delta if event.type == "response.output_text.delta" else ""
            last = event
    assert last is not None
    assert last.type == "response.completed"
    assert last.response.output_text == said
    return said, merged(last.response.model_extra)


def by_generate(server: Running, text: str, url: str | None, **fields: Any) -> Said:
    reply = server.post("/generate", {"prompt": text, "images": [url] if url else [], **fields}).json()
    return reply["text"], reply


def by_streamed_generate(server: Running, text: str, url: str | None, **fields: Any) -> Said:
    body = {"prompt": text, "images": [url] if url else [], **fields}
    *tokens, last = events(server.post("/generate_stream", body))
    assert [token["index"] for token in tokens if token["token"]] == list(range(sum(bool(t["token"]) for t in tokens)))
    said = "".join(token["text"] for token in tokens)
    assert said == last["text"]
    return said, last


def asked(text: str, url: str | None) -> Any:
    pictures = [{"type": "input_image", "image_url": url}] if url else []
    return [{"role": "user", "content": [*pictures, {"type": "input_text", "text": text}]}]


def merged(extra: dict[str, Any] | None) -> dict[str, Any]:
    assert extra is not None
    report = extra["kaminari"]
    return {"saw": report["saw"], **report["choices"][0]}


WAYS = [by_chat, by_streamed_chat, by_responses, by_streamed_responses, by_generate, by_streamed_generate]
ways = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
Way = Callable[..., Said]


@ways
def test_every_reply_says_what_was_seen(seeing: Running, way: Way) -> None:
    _, report = way(seeing, "hello", sideways())
    (saw,) = report["saw"]
    assert saw == {
        "format": "JPEG", "decoded": [64, 32], "rotation": "90", "sizing": "bucket", "canvas": [192, 352],
        "content": saw["content"], "grid": [11, 6], "visual_tokens": 66, "budget": 66, "page": 1, "pages": 1, "source": None,
    } | {name: saw[name] for name in ("canvas", "grid", "visual_tokens", "budget")}  # fmt: skip
    assert saw["visual_tokens"] == saw["grid"][0] * saw["grid"][1] <= saw["budget"]
    assert [side // 32 for side in saw["canvas"]] == saw["grid"][::-1]
    left, top, width, height = saw["content"]
    assert height == pytest.approx(2 * width, abs=1), "upright, it is twice as tall as wide"
    assert left + width <= saw["canvas"][0]
    assert top + height <= saw["canvas"][1]


@ways
def test_without_pictures_nothing_was_seen_and_what_was_not_asked_for_is_not_there(seeing: Running, way: Way) -> None:
    text, report = way(seeing, "hello", None)
    assert (text, report["saw"], report["finish_detail"]) == ("hello", [], "end_token")
    assert {"confidence", "boxes", "repeat"} & report.keys() == set()


def test_the_older_completions_say_it_too(seeing: Running) -> None:
    asked: Any = {"model": "echo", "prompt": LOOP, "extra_body": {"loop_guard": True, "confidence": True}}
    with seeing.openai() as client:
        plain = client.completions.create(**asked)
        *chunks, last = client.completions.create(**asked, stream=True)
    assert plain.choices[0].text == "".join(chunk.choices[0].text for chunk in [*chunks, last]) == TRIMMED
    for reply in (plain, last):
        report = merged(reply.model_extra)
        assert (report["saw"], report["finish_detail"], report["repeat"]["period"]) == ([], "loop", 3)
        assert report["confidence"]["lines"][0]["text"] == TRIMMED


@ways
def test_a_loop_ends_and_its_text_is_one_copy(seeing: Running, way: Way) -> None:
    text, report = way(seeing, LOOP, None, loop_guard=True)
    assert text == TRIMMED
    assert report["finish_detail"] == "loop"
    # The space in front of the first price is the one that ends each of them.
    assert report["repeat"] == {"period": 3, "copies": 85, "kept": 10}


@pytest.mark.parametrize(
    ("fields", "guarded"),
    [
        ({}, False), ({"task": "ocr"}, True), ({"task": "caption"}, False), ({"task": "ocr", "loop_guard": False}, False),
        ({"loop_guard": True}, True), ({"task": "ocr", "ignore_eos": True}, False),
    ],
)  # fmt: skip
def test_reading_tasks_are_guarded_by_themselves(seeing: Running, fields: dict[str, Any], guarded: bool) -> None:
    for way in (by_chat, by_responses):
        limit = {"max_output_tokens" if way is by_responses else "max_tokens": 400}
        if fields.get("ignore_eos") and way is by_responses:
            continue
        text, report = way(seeing, LOOP, None, **fields, **limit)
        assert (text, report["finish_detail"] == "loop") == (TRIMMED if guarded else LOOP, guarded)
    finishes = seeing.http.get("/metrics").text
    assert 'kaminari_loops_total{model="echo"}' in finishes


def test_loops_are_counted(seeing: Running) -> None:
    def count() -> float:
        (line,) = [
            line for line in seeing.http.get("/metrics").text.splitlines() if line.startswith("kaminari_loops_total")
        ]
        return float(line.rpartition(" ")[2])

    before = count()
    by_chat(seeing, LOOP, None, loop_guard=True)
    by_chat(seeing, "hello", None, loop_guard=True)
    assert count() == before + 1


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/responses"])
def test_a_picture_with_a_task_gets_the_tasks_words(tiny: Running, route: str) -> None:
    def body(text: str | None, **fields: Any) -> dict[str, Any]:
        if route.endswith("responses"):
            (item,) = asked(text or "", picture())
            if text is None:
                item["content"].pop()
            return {"model": "tiny", "input": [item], "max_output_tokens": 4, **fields}
        message = picture_message(picture(), text=text or "")
        if text is None:
            message["content"].pop()
        return {"model": "tiny", "messages": [message], "max_tokens": 4, **fields}

    def said(body: dict[str, Any]) -> Any:
        reply = tiny.post(route, body).json()
        return reply["usage"]["total_tokens"], reply.get("choices") or reply["output"][0]["content"]

    assert said(body(None, task="caption")) == said(body("describe"))
    assert said(body("what?", task="caption")) == said(body("what?"))
    refused = tiny.post(route, body("what?", task="dance"))
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unknown_task")
    assert refused.json()["error"]["param"] == "task"


@ways
def test_confidence_is_given_to_those_who_ask(seeing: Running, way: Way) -> None:
    text, report = way(seeing, '{"total": "12.40",\n"n": 3}', None, confidence=True)
    lines, fields = report["confidence"]["lines"], report["confidence"]["fields"]
    assert [(line["index"], line["text"]) for line in lines] == list(enumerate(text.split("\n")))
    assert [(field["path"], field["value"]) for field in fields] == [("/total", "12.40"), ("/n", 3)]
    # One of 259 logits is one, the others are zero.
    certain = pytest.approx(2.718281828 / (258 + 2.718281828), rel=1e-5)
    assert all(each[name] == certain for each in [*lines, *fields] for name in ("mean", "minimum"))
    assert fields[1]["joint"] == certain
    assert all(each["calibrated"] is None for each in [*lines, *fields])


@ways
def test_boxes_are_given_in_pixels_of_the_uploaded_file(seeing: Running, way: Way) -> None:
    text, report = way(seeing, BOX, sideways(), boxes=True)
    assert text == BOX, "the reply itself stays as the model wrote it"
    (box,) = report["boxes"]
    assert (box["label"], box["model"], box["picture"]) == ("left half", [0, 0, 500, 1000], 0)
    # Turned clockwise, the left half of what is seen is the lower half of what is stored.
    left, top, right, bottom = box["file"]
    assert (left, right, bottom) == pytest.approx((0, 64, 32), abs=0.5)
    assert top == pytest.approx(16, abs=1)
    assert way(seeing, "none here", sideways(), boxes=True)[1]["boxes"] == []
