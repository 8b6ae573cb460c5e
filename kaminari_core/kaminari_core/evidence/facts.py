"""The values that evidence is reported in. Frozen and picklable, for they are part of requests and results (see flow.py)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Source:
    """Where a picture comes from that is itself a part of an uploaded file: a page of it, or a piece of a page.

    `size` is (width, height) of the file's own pixels (of that page, as it was drawn if the file holds none), before `rotation`,
    which is as in `flow.Saw`; `crop` the rectangle (left, top, width, height) of the upright page that the picture shows.
    `page` counts from 1, and `pages` are those of the file.
    """

    size: tuple[int, int]
    rotation: str
    crop: tuple[int, int, int, int]
    page: int = 1
    pages: int = 1


@dataclass(frozen=True, slots=True)
class GroundedBox:
    """A box that a model wrote: left, top, right, bottom.

    `model` is as it was written, in thousandths of what the model saw; `file` in pixels of the uploaded file as it is stored,
    None where that cannot be told. `picture` is the number of the picture that it is in, from 0, None where there are several.
    """

    label: str | None
    model: tuple[float, float, float, float]
    file: tuple[float, float, float, float] | None
    picture: int | None


@dataclass(frozen=True, slots=True)
class Repeat:
    """The loop that ended a reply: `copies` whole repetitions of `period` tokens were generated.

    The reply's first `kept` tokens are left: what comes before the loop, and one copy of it.
    """

    period: int
    copies: int
    kept: int


@dataclass(frozen=True, slots=True)
class LineConfidence:
    """How sure the model was of a line, from the probabilities of its tokens: their mean, their minimum, their product `joint`.

    `index` is the line's number in the text, from 0; lines without anything but space are left out. `calibrated` is the
    probability that the line is right, where the checkpoint has a calibration, else None.
    """

    index: int
    text: str
    mean: float
    minimum: float
    joint: float
    calibrated: float | None


@dataclass(frozen=True, slots=True)
class FieldConfidence:
    """As `LineConfidence`, of one value of a JSON reply. `path` is its JSON pointer (RFC 6901), such as `/items/0/price`."""

    path: str
    value: str | float | bool | None
    mean: float
    minimum: float
    joint: float
    calibrated: float | None


@dataclass(frozen=True, slots=True)
class Confidence:
    """How sure the model was of a reply, line by line, and field by field where the reply is a JSON object or list."""

    lines: tuple[LineConfidence, ...]
    fields: tuple[FieldConfidence, ...]
