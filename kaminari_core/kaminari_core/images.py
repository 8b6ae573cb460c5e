"""Encoded pictures -> upright 8-bit RGB, within limits, or an error that says what is wrong with them.

    data: URL -> bytes -> Header (format and size, no pixels) -> limits -> Picture (upright, flattened on white)

The declared type of a picture is never believed: the first bytes decide. Limits are checked on headers, so that a small file
cannot unfold to gigabytes. Of several frames (GIF, WebP, APNG, AVIF) the first is taken, of several pages (TIFF) the first,
of several pictures (MPO) the main one. Transparency is flattened on white, the colour that paper has; colour profiles are
not applied. Deep pixels are scaled to 8 bits, never clipped.

The seam lies at `PIL.Image`: everything above speaks of requests, everything below of pixels. Pillow's readers are called
directly instead of through `Image.open`, whose own size limit is a global of the process: it belongs to the host program, which
may have set it for other reasons, so it is neither changed nor allowed to decide here.
"""

from __future__ import annotations

import importlib.util
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import (
    AvifImagePlugin,
    BmpImagePlugin,
    ExifTags,
    GifImagePlugin,
    Image,
    ImageFile,
    JpegImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
    features,
)

from kaminari_core.config import EngineConfig
from kaminari_core.errors import ImageError


def _read_heif(file: io.BytesIO) -> ImageFile.ImageFile:
    from pillow_heif import HeifImageFile

    image: ImageFile.ImageFile = HeifImageFile(file)
    return image


READERS: Final[Mapping[str, Callable[[io.BytesIO], ImageFile.ImageFile]]] = MappingProxyType(
    {
        "JPEG": JpegImagePlugin.JpegImageFile,
        "PNG": PngImagePlugin.PngImageFile,
        "WebP": WebPImagePlugin.WebPImageFile,
        "GIF": GifImagePlugin.GifImageFile,
        "TIFF": TiffImagePlugin.TiffImageFile,
        "BMP": BmpImagePlugin.BmpImageFile,
        "AVIF": AvifImagePlugin.AvifImageFile,
        "HEIC": _read_heif,
    }
)
SIGNATURES: Final = (
    ("JPEG", b"\xff\xd8\xff"),
    ("PNG", b"\x89PNG\r\n\x1a\n"),
    ("GIF", b"GIF87a"),
    ("GIF", b"GIF89a"),
    ("TIFF", b"II*\0"),
    ("TIFF", b"MM\0*"),
    ("TIFF", b"II+\0"),
    ("TIFF", b"MM\0+"),
    ("BMP", b"BM"),
    ("PDF", b"%PDF-"),
    ("JPEG XL", b"\xff\x0a"),
    ("JPEG XL", b"\0\0\0\x0cJXL "),
    ("JPEG 2000", b"\0\0\0\x0cjP  "),
    ("JPEG 2000", b"\xff\x4f\xff\x51"),
    ("Photoshop", b"8BPS"),
    ("icon", b"\0\0\1\0"),
)
BITS_PER_SAMPLE, PHOTOMETRIC, TILE_WIDTH, TILE_LENGTH, SAMPLE_FORMAT = 258, 262, 322, 323, 339  # TIFF tags
WHITE_IS_ZERO, UNSIGNED = 0, 1  # and values of two of them
HEIF_EXTRA: Final = ", and HEIC with the extra kaminari-core[heif]"
HEIC_BRANDS: Final = (b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"mif1", b"msf1")
TURNS: Final[Mapping[int, tuple[str, Image.Transpose]]] = MappingProxyType(
    {
        2: ("none+mirror", Image.Transpose.FLIP_LEFT_RIGHT),
        3: ("180", Image.Transpose.ROTATE_180),
        4: ("180+mirror", Image.Transpose.FLIP_TOP_BOTTOM),
        5: ("90+mirror", Image.Transpose.TRANSPOSE),
        6: ("90", Image.Transpose.ROTATE_270),
        7: ("270+mirror", Image.Transpose.TRANSVERSE),
        8: ("270", Image.Transpose.ROTATE_90),
    }
)
"""EXIF orientation -> how `flow.Saw` calls it (turned clockwise, then mirrored left to right) and Pillow's operation."""


@dataclass(frozen=True, slots=True)
class Header:
    """What is known of a picture before its pixels are decoded; `size` is (width, height) as stored in the file."""

    name: str
    format: str
    size: tuple[int, int]
    reader: ImageFile.ImageFile

    @property
    def pixels(self) -> int:
        """Width times height."""
        return self.size[0] * self.size[1]


@dataclass(frozen=True, slots=True)
class Picture:
    """A decoded picture: `image` is upright, mode RGB; `decoded` is its (width, height) in the file, before `rotation`."""

    image: Image.Image
    format: str
    decoded: tuple[int, int]
    rotation: str


def sniff(data: bytes) -> str | None:
    """The format that the first bytes announce, whether it is accepted or not; None when nothing is recognised."""
    for kind, signature in SIGNATURES:
        if data.startswith(signature):
            return kind
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WebP"
    if data[4:8] == b"ftyp":
        box = data[8 : min(int.from_bytes(data[:4], "big"), 256)]
        brands = [box[start : start + 4] for start in range(0, len(box), 4)]
        if b"avif" in brands or b"avis" in brands:
            return "AVIF"
        return "HEIC" if any(brand in HEIC_BRANDS for brand in brands) else None
    start = data[:1024].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if start.startswith(b"<svg") or (start.startswith((b"<?xml", b"<!doctype svg", b"<!--")) and b"<svg" in start):
        return "SVG"
    return "HTML" if start.startswith((b"<!doctype html", b"<html")) else None


def accepted_formats() -> tuple[str, ...]:
    """The formats that this installation decodes: those of its Pillow, and HEIC with pillow-heif."""
    return tuple(kind for kind in READERS if _is_decoded(kind))


def _is_decoded(kind: str) -> bool:
    if kind == "HEIC":
        return importlib.util.find_spec("pillow_heif") is not None
    return kind not in ("AVIF", "WebP") or bool(features.check(kind.lower()))


def read_header(data: bytes, name: str) -> Header:
    """Read format and size without decoding pixels. Raises ImageError, with `name` as its param."""
    kind = sniff(data)
    accepted = accepted_formats()
    if kind not in accepted:
        found = (
            "is empty" if not data else f"is of the format {kind}" if kind else "is in no picture format that is known"
        )
        more = HEIF_EXTRA if kind in ("HEIC", "AVIF") else ""
        raise _unreadable(name, f"{found}; accepted are {', '.join(accepted)}{more}", code="unsupported_image_format")
    try:
        reader = READERS[kind](io.BytesIO(data))
    except MemoryError:
        raise
    except Exception as error:  # Pillow's readers raise a dozen classes on damaged headers, SyntaxError among them
        raise _unreadable(name, f"begins like a {kind} file but its header is damaged ({error})") from error
    width, height = reader.size
    if isinstance(reader, TiffImagePlugin.TiffImageFile) and reader.tag_v2.get(ExifTags.Base.Orientation) in (
        5,
        6,
        7,
        8,
    ):
        width, height = height, width  # Pillow announces the turned size of this one format
    if width < 1 or height < 1:
        raise _unreadable(name, f"is {width} x {height} pixels, which is no picture")
    return Header(name, kind, (width, height), reader)


def check_limits(headers: Sequence[Header], config: EngineConfig) -> None:
    """Refuse a request whose pictures are too many or too large. Raises ImageError naming the first one too much."""
    if len(headers) > config.max_images:
        raise ImageError(
            f"the request has {len(headers)} pictures, but at most {config.max_images} are allowed (max-images)",
            param=headers[config.max_images].name,
            code="too_many_images",
        )
    total = 0
    for header in headers:
        size = "{} x {}".format(*header.size)
        if max(header.pixels, _tile_pixels(header)) > config.max_image_pixels:
            raise _too_large(header, f"{size} pixels are more than the {config.max_image_pixels:,}", "max-image-pixels")
        total += header.pixels
        if total > config.max_request_pixels:
            most = f"the {config.max_request_pixels:,} of all pictures of one request together"
            raise _too_large(header, f"with {size} pixels the request exceeds {most}", "max-request-pixels")


def decode(header: Header) -> Picture:
    """Decode, turn upright and flatten. Raises ImageError for a file that is cut off or damaged."""
    reader = header.reader
    # Pillow turns TIFF upright while it loads and forgets the tag; other formats may have their EXIF behind the pixels.
    orientation = _orientation(reader) if header.format == "TIFF" else None
    try:
        reader.load()
        image = _flatten(reader)
    except (MemoryError, ImageError):
        raise
    except Exception as error:  # as in read_header
        raise _unreadable(header.name, f"is a damaged or incomplete {header.format} file ({error})") from error
    turn = TURNS.get(_orientation(reader) if orientation is None else orientation)
    if turn and orientation is None:
        image = image.transpose(turn[1])
    return Picture(image, header.format, header.size, turn[0] if turn else "none")


def open_picture(data: bytes, name: str, config: EngineConfig) -> Picture:
    """Read one picture from the bytes of its file. Raises ImageError, with `name` as its param."""
    header = read_header(data, name)
    check_limits([header], config)
    return decode(header)


def _orientation(image: Image.Image) -> int:
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # damaged EXIF data says nothing about the pixels, which are then taken as they are stored
        return 1
    return orientation if isinstance(orientation, int) else 1


def _flatten(image: ImageFile.ImageFile) -> Image.Image:
    """Any mode -> RGB, with transparency on white."""
    if image.mode[0] in "IF":
        return _from_deep(image)
    if not image.has_transparency_data:
        return image if image.mode == "RGB" else image.convert("RGB")
    if image.mode == "RGB" and isinstance(image, PngImagePlugin.PngImageFile):
        _match_depth(image)
    layers = image.convert("RGBA")
    paper = Image.new("RGB", image.size, "white")
    paper.paste(layers, mask=layers.getchannel("A"))
    return paper


def _match_depth(image: PngImagePlugin.PngImageFile) -> None:
    """Cut the transparent colour of a 16-bit PNG to the 8 bits that Pillow has kept of its pixels."""
    transparent = image.info["transparency"]
    if max(transparent) > 255:
        image.info["transparency"] = tuple(value >> 8 for value in transparent)


def _from_deep(image: ImageFile.ImageFile) -> Image.Image:
    """16-bit and 32-bit grey -> RGB over the range that the file declares or, where it declares none, that it uses."""
    values = np.asarray(image)
    tags: Mapping[int, object] = getattr(image, "tag_v2", {})
    bits, kind = _first(tags.get(BITS_PER_SAMPLE), 16), _first(tags.get(SAMPLE_FORMAT), UNSIGNED)
    if image.mode.startswith("I;16"):
        levels = np.arange(65536, dtype=np.float64) * (255 / (2**bits - 1))
        grey = np.rint(levels).clip(0, 255).astype(np.uint8)[values]
    else:
        grey = _stretch(values.view(np.uint32) if image.mode == "I" and bits == 32 and kind == UNSIGNED else values)
    if tags.get(PHOTOMETRIC) == WHITE_IS_ZERO:
        grey = 255 - grey
    transparent = image.info.get("transparency")
    if transparent is not None:
        grey = np.where(values == transparent, np.uint8(255), grey)
    return Image.fromarray(grey).convert("RGB")


def _stretch(values: NDArray[np.generic]) -> NDArray[np.uint8]:
    """Numbers of unknown meaning -> 0..255: taken as 0..1 (floats) or 0..255 if they fit, else over their own range."""
    scaled = values.astype(np.float64)
    low, high = float(scaled.min()), float(scaled.max())
    if not math.isfinite(high - low):
        raise ValueError("it has pixels that are not finite numbers")
    if low >= 0 and high <= 255:
        low, high = 0.0, 1.0 if values.dtype.kind == "f" and high <= 1 else 255.0
    scaled -= low
    scaled *= 255 / (high - low) if high > low else 0.0
    return np.rint(scaled, out=scaled).astype(np.uint8)


def _first(value: object, default: int) -> int:
    found = value[0] if isinstance(value, tuple) and value else value
    return found if isinstance(found, int) else default


def _tile_pixels(header: Header) -> int:
    """The area of one TIFF tile, which is decoded whole and may be larger than the picture."""
    tags: Mapping[int, object] = getattr(header.reader, "tag_v2", {})
    return _first(tags.get(TILE_WIDTH), 0) * _first(tags.get(TILE_LENGTH), 0)


def _unreadable(name: str, what: str, *, code: str = "invalid_image") -> ImageError:
    return ImageError(f"{name}: the picture {what}", param=name, code=code)


def _too_large(header: Header, what: str, limit: str) -> ImageError:
    return ImageError(
        f"{header.name}: {what} allowed ({limit}); send a smaller picture", param=header.name, code="image_too_large"
    )
