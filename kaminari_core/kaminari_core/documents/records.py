"""A page's result as JSON: what `kaminari read --format json` writes, and what `--resume` goes by.

    {"path", "page", "pages", "status", "text", "error", "finish_reason", "finish_detail", "usage", "confidence", "lines",
     "fields", "seen", "pieces", "seconds", "sha256", "id"}

`complete` is there as well where the text was held to a structure.

The identity of a page (`id`) is made of its path, the hash of the file, its number and the settings that its text depends on:
when one of them is another, it is another page.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kaminari_core.errors import KaminariError

if TYPE_CHECKING:
    from kaminari_core.documents.pages import PageResult

Record = dict[str, Any]


def page_id(path: str, sha256: str, page: int, settings: Mapping[str, Any]) -> str:
    """The identity of a page: 128 bits in hexadecimal."""
    content = json.dumps([path, sha256, page, settings], sort_keys=True)
    return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def page_record(result: PageResult) -> Record:
    """What became of a page, as JSON values."""
    from kaminari_core.documents.pages import page_confidence

    sure = page_confidence(result)
    record = {
        "path": result.name,
        "page": result.page,
        "pages": result.pages,
        "status": result.status,
        "text": None if result.status == "failed" else result.text,
        "error": None if result.error is None else error_record(result.error),
        "finish_reason": result.finish_reason,
        "finish_detail": result.finish_detail,
        "confidence": None if sure is None else {"mean": sure[0], "minimum": sure[1]},
        "lines": [dataclasses.asdict(line) for line in result.lines],
        "fields": [dataclasses.asdict(field) for field in result.fields],
        "usage": dataclasses.asdict(result.usage),
        "seen": None if result.seen is None else dataclasses.asdict(result.seen),
        "pieces": [dataclasses.asdict(piece) for piece in result.pieces],
        "seconds": round(result.seconds, 3),
    }
    return record if result.complete is None else {**record, "complete": result.complete}


def error_record(error: KaminariError) -> Record:
    """Why a page failed: the message, and the code where there is one."""
    return {"message": str(error), "code": error.code}


def as_line(record: Record) -> str:
    """A record on one line of JSON, without its line break."""
    return json.dumps(record, ensure_ascii=False)
