"""`/v1/ocr`, and documents inside conversations: pages in, what became of each of them out."""

from __future__ import annotations

import base64
import json
import time
from typing import Any

import httpx2
import pytest
from PIL import Image

from kaminari_core.testing import EchoModel, TinyModel
from tests.documents.files import ENCRYPTION, drawn_pdf, encode, pdf, sheet
from tests.http.serving import Running, Start, raw_connection
from tests.http.test_bad_requests import error_of
from tests.http.test_lifecycle import wait_until
from tests.http.test_media import send, upstream

PAGE = sheet("print", (96, 64))
THREE = pdf(PAGE, sheet(size=(96, 64)), PAGE, broken=[3])
"""A page with print, a blank one and a broken one."""


class Slow(TinyModel):
    """Takes 5 ms for a step, so that a test can do something in between."""

    def decode(self, *arguments: Any) -> Any:
        time.sleep(0.005)
        return super().decode(*arguments)


def url(data: bytes, kind: str = "application/pdf") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def form(server: Running, file: bytes, name: str = "scan.pdf", **fields: Any) -> httpx2.Response:
    return server.http.post("/v1/ocr", files={"file": (name, file)}, data={"max_tokens": 4, "dpi": 72, **fields})


def events_of(text: str) -> list[tuple[str, dict[str, Any]]]:
    """The name and the JSON of each event."""
    blocks = [block.split("\n") for block in text.strip().split("\n\n") if not block.startswith(":")]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in blocks]


def test_every_page_has_an_end(tiny: Running) -> None:
    reply = form(tiny, THREE)
    body = reply.json()
    assert body["summary"] == {
        "request_id": reply.headers["x-request-id"], "model": "tiny", "task": "ocr", "format": "PDF", "document_pages": 3,
        "pages": 3, "read": 1, "blank": 1, "failed": 1, "usage": body["pages"][0]["usage"], "done": True,
    }  # fmt: skip
    read, blank, failed = body["pages"]
    assert [(page["page"], page["status"]) for page in body["pages"]] == [(1, "read"), (2, "blank"), (3, "failed")]
    assert (read["error"], read["finish_detail"], read["usage"]["completion_tokens"]) == (None, "max_tokens", 4)
    assert read["seen"] == {"format": "PDF", "decoded": [96, 64], "rotation": "none", "size": [96, 64]}
    assert read["pieces"][0]["saw"]["source"]["pages"] == 3
    assert (blank["text"], blank["usage"]["total_tokens"], blank["pieces"][0]["saw"]) == ("", 0, None)
    assert (failed["text"], failed["seen"], failed["error"]["code"]) == (None, None, "damaged_page")
    tiny.settle()


def test_json_and_form_and_run_through_generate_say_the_same(tiny: Running) -> None:
    data = encode(PAGE)
    sent = form(tiny, data, "page.png").json()["pages"][0]
    asked = tiny.post("/v1/ocr", {"file": url(data, "image/png"), "max_tokens": 4}).json()["pages"][0]
    native = tiny.post("/generate", {"task": "ocr", "images": [url(data, "image/png")], "max_tokens": 4}).json()
    assert sent["text"] == asked["text"] == native["text"]
    assert asked["pieces"][0]["saw"] == native["saw"][0]
    assert [line["text"] for line in asked["lines"]] == [line for line in asked["text"].split("\n") if line.strip()]
    unsure = tiny.post("/v1/ocr", {"file": url(data), "max_tokens": 4, "confidence": False}).json()["pages"][0]
    assert (unsure["text"], unsure["confidence"], unsure["lines"]) == (asked["text"], None, [])


def test_stream_has_an_event_per_page_and_a_summary(tiny: Running) -> None:
    reply = form(tiny, THREE, stream="true")
    assert reply.headers["content-type"].startswith("text/event-stream")
    *pages, (name, summary) = events_of(reply.text)
    assert ({kind for kind, _ in pages}, name) == ({"page"}, "summary")
    plain = form(tiny, THREE).json()
    same = ("status", "text", "error", "finish_detail", "usage", "seen", "pieces", "lines")
    for _, page in pages:
        other = plain["pages"][page["page"] - 1]
        assert {key: page[key] for key in same} == {key: other[key] for key in same}
    assert sorted(page["page"] for _, page in pages) == [1, 2, 3]
    assert {**summary, "request_id": ""} == {**plain["summary"], "request_id": ""}


def test_pages_blank_check_and_split_are_choices(tiny: Running) -> None:
    assert [page["page"] for page in form(tiny, THREE, pages="1-2").json()["pages"]] == [1, 2]
    assert form(tiny, THREE, pages="2", blank_check="false").json()["pages"][0]["status"] == "read"
    tall = Image.new("L", (200, 4000), 250)
    for top in range(0, 4000, 40):
        tall.paste(PAGE.crop((0, 8, 96, 32)), (0, top))
    pieces = form(tiny, encode(tall)).json()["pages"][0]["pieces"]
    assert len(pieces) > 1
    assert (pieces[0]["box"][1], pieces[-1]["box"][1] + pieces[-1]["box"][3]) == (0, 4000)
    assert len(form(tiny, encode(tall), split="false").json()["pages"][0]["pieces"]) == 1


@pytest.mark.parametrize(
    ("file", "fields", "status", "code", "words"),
    [
        (b"hello", {}, 400, "unsupported_document_format", "accepted are JPEG, PNG"),
        (drawn_pdf(trailer=ENCRYPTION), {}, 400, "encrypted_document", "password"),
        (THREE[:400], {}, 400, "damaged_document", "damaged"),
        (THREE, {"pages": "3"}, 400, "damaged_page", "this page of the PDF file is damaged"),
        (THREE, {"pages": "4-"}, 400, "no_such_page", "it has 3 pages"),
        (THREE, {"pages": "x"}, 400, None, "page numbers from 1 on"),
        (THREE, {"dpi": "1"}, 400, None, "10"),
        (THREE, {"task": "x"}, 400, "unknown_task", "tasks"),
        (THREE, {"unknown": "x"}, 400, None, "unknown"),
        (THREE, {"template": "{"}, 400, None, "begins like JSON"),
        (drawn_pdf("0 0 9000 9000"), {"dpi": "2400"}, 400, "image_too_large", "64,000,000"),
        (b"", {}, 400, None, "no file"),
    ],
    ids="text encrypted damaged broken-page no-page pages dpi task unknown template pixels empty".split(),
)
@pytest.mark.parametrize("stream", ["true", "false"])
def test_what_cannot_be_read_is_refused(
    tiny: Running, file: bytes, fields: dict[str, Any], status: int, code: str | None, words: str, stream: str
) -> None:
    reply = form(tiny, file, **fields, stream=stream)
    assert (reply.status_code, error_of(reply)["code"]) == (status, code)
    assert words in error_of(reply)["message"]


def test_limits_have_numbers(start: Start) -> None:
    server = start(TinyModel, app={"max_pages": 2, "max_body": 20_000})
    error = error_of(form(server, THREE))
    assert (error["code"], error["param"], "3 pages are wanted" in error["message"]) == (
        "too_many_pages",
        "pages",
        True,
    )
    assert form(server, THREE, pages="1-2").status_code == 200
    reply = form(server, THREE + b"\n" * 20_000)
    assert (reply.status_code, reply.json()["error"]["code"]) == (413, "body_too_large")
    server.settle()


def test_forms_of_other_sites_are_not_taken(start: Start) -> None:
    server = start(TinyModel, app={"cors_origins": ("https://friend.example",)})

    def status(origin: str) -> int:
        file = {"file": ("a.png", encode(PAGE))}
        data = {"max_tokens": "1"}
        return server.http.post("/v1/ocr", files=file, data=data, headers={"Origin": origin}).status_code

    assert (status("https://evil.example"), status("null")) == (403, 403)
    assert (status("https://friend.example"), status(server.url)) == (200, 200)


def test_a_form_says_what_it_is(tiny: Running) -> None:
    two = tiny.http.post("/v1/ocr", files=[("file", ("a", b"x")), ("file", ("b", b"y"))])
    assert two.status_code == 400
    other = tiny.http.post("/v1/ocr", files={"picture": ("a", b"x")})
    assert "call it 'file'" in error_of(other)["message"]
    assert error_of(tiny.post("/v1/ocr", {"pages": "1"}))["param"] == "file"
    broken = tiny.http.post(
        "/v1/ocr", content=b"--x\r\nnothing", headers={"Content-Type": "multipart/form-data; boundary=x"}
    )
    assert broken.status_code == 400
    named = tiny.http.post("/v1/ocr", files={"file": (None, url(encode(PAGE), "image/png"))}, data={"max_tokens": 1})
    assert named.json()["summary"]["read"] == 1


def test_a_model_without_pictures_reads_nothing(start: Start) -> None:
    assert error_of(form(start(EchoModel), THREE))["code"] == "pictures_not_supported"


@pytest.mark.parametrize("stream", [True, False])
def test_client_that_leaves_frees_its_rows(start: Start, stream: bool) -> None:
    server = start(Slow, slots=2, max_length=2048)
    fields = {"max_tokens": 1500, "stream": stream, "dpi": 72, "timeout": 60}
    content = json.dumps({"file": url(pdf(*[PAGE] * 6)), **fields}).encode()
    with raw_connection(server.url) as client:
        head = f"POST /v1/ocr HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        client.sendall(head.encode() + content)
        wait_until(lambda: server.engine.stats().running == 2, 20)
    server.settle(10)
    assert server.engine.stats().finished == {"cancelled": 2}
    assert form(server, encode(PAGE)).status_code == 200


def test_a_full_queue_refuses_the_first_page_only(start: Start) -> None:
    server = start(Slow, slots=1, queue=1, max_length=2048)
    # With one request in the queue and one running, the pages of a document still all have their turn.
    body = form(server, pdf(*[PAGE] * 4), max_tokens=8).json()
    assert (body["summary"]["read"], body["summary"]["failed"]) == (4, 0)


def test_a_document_is_fetched_from_allowed_hosts_only(start: Start) -> None:
    with upstream(doc=send(200, "application/pdf", THREE)) as (host, _):
        server = start(TinyModel, app={"allow_media_hosts": (host,)})
        body = {"file": f"http://{host}/doc", "dpi": 72, "max_tokens": 2}
        assert server.post("/v1/ocr", body).json()["summary"]["read"] == 1
        refused = error_of(server.post("/v1/ocr", {**body, "file": "http://other.example/doc"}))
        assert (refused["param"], refused["code"]) == ("file", "media_host_not_allowed")
        part = {"type": "input_file", "file_url": f"http://{host}/doc"}
        asked = {"model": "echo", "input": [{"role": "user", "content": [part]}], "max_output_tokens": 2}
        assert error_of(server.post("/v1/responses", asked))["code"] == "damaged_page"


def chat(server: Running, *parts: dict[str, Any]) -> httpx2.Response:
    content = [*parts, {"type": "text", "text": "read"}]
    body = {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 3}
    return server.post("/v1/chat/completions", body)


def test_the_pages_of_a_file_part_are_pictures_in_order(tiny: Running) -> None:
    small, large = sheet("a", (64, 64)), sheet("b", (128, 64))
    document = pdf(small, large)
    body = chat(tiny, {"type": "file", "file": {"file_data": url(document), "filename": "a.pdf"}}).json()
    widths = [saw["source"]["size"] for saw in body["kaminari"]["saw"]]
    assert [saw["source"]["page"] for saw in body["kaminari"]["saw"]] == [1, 2]
    assert widths[1][0] == pytest.approx(2 * widths[0][0], abs=2)
    # Bare base64 is what the reference of OpenAI's API calls it.
    bare = chat(tiny, {"type": "file", "file": {"file_data": base64.b64encode(document).decode()}}).json()
    assert bare["choices"] == body["choices"]
    part = {"type": "input_file", "file_data": url(document)}
    item = {"role": "user", "content": [part, {"type": "input_text", "text": "read"}]}
    response = tiny.post("/v1/responses", {"model": "tiny", "input": [item], "max_output_tokens": 3}).json()
    assert response["kaminari"]["saw"] == body["kaminari"]["saw"]
    client = tiny.openai().chat.completions.create(
        model="tiny",
        max_tokens=3,
        messages=[{"role": "user", "content": [{"type": "file", "file": {"file_data": url(document)}}]}],
    )
    assert client.usage is not None
    assert client.usage.prompt_tokens_details is not None


@pytest.mark.parametrize(
    ("file", "code", "param"),
    [
        ({"file_id": "file-1"}, "unsupported_parameter", "messages[0].content[0]"),
        ({"filename": "a.pdf"}, None, "messages[0].content[0]"),
        ({"file_data": url(THREE)}, "damaged_page", "messages[0].content[0]"),
        ({"file_data": url(b"hello")}, "unsupported_document_format", "messages[0].content[0]"),
        ({"file_data": url(pdf(*[PAGE] * 17))}, "too_many_images", "messages[0].content[0]"),
        ({"file_data": "data:application/pdf;base64,*"}, "invalid_image_url", "messages[0].content[0]"),
    ],
    ids="id nothing broken text pages base64".split(),
)
def test_file_parts_that_cannot_be_read(tiny: Running, file: dict[str, str], code: str | None, param: str) -> None:
    error = error_of(chat(tiny, {"type": "file", "file": file}))
    assert (error["code"], error["param"]) == (code, param)
