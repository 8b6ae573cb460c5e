"""Encoded pictures in every shape that people send, and what must come out: the picture, or an error that says why not."""

from __future__ import annotations

import io
import itertools
import random
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable

import numpy as np
import pillow_heif
import pytest
from PIL import ExifTags, Image, ImageFile

from kaminari_core.config import EngineConfig
from kaminari_core.errors import ImageError
from kaminari_core.images import accepted_formats, check_limits, open_picture, read_header, sniff

CONFIG = EngineConfig()
RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)
Edit = Callable[[bytes], bytes]


def encode(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def opened(data: bytes) -> Image.Image:
    return open_picture(data, "picture", CONFIG).image


def pixels_or_none(data: bytes, config: EngineConfig = CONFIG) -> bytes | None:
    """The decoded pixels, or None for a file that is properly refused."""
    try:
        return open_picture(data, "picture", config).image.tobytes()
    except ImageError as error:
        return None if error.param == "picture" else error.args[0]


def corners(image: Image.Image) -> list[tuple[int, ...]]:
    """The corner colours, rounded to what lossy formats keep, clockwise from the upper left."""
    width, height = image.size
    points = [(2, 2), (width - 3, 2), (width - 3, height - 3), (2, height - 3)]
    return [tuple(255 * (value > 127) for value in image.getpixel(point)) for point in points]  # type: ignore[union-attr]


def quartered(size: tuple[int, int] = (64, 32)) -> Image.Image:
    """Four colours, one in each quarter, so that each of the eight orientations looks different."""
    image = Image.new("RGB", size, WHITE)
    half = size[0] // 2, size[1] // 2
    image.paste(RED, (0, 0, *half))
    image.paste(GREEN, (half[0], 0, size[0], half[1]))
    image.paste(BLUE, (half[0], half[1], *size))
    return image


def photo(size: tuple[int, int] = (97, 61)) -> Image.Image:
    """Smooth ramps with a little noise, so that every format stores something everywhere."""
    columns, rows = np.meshgrid(np.arange(size[0]), np.arange(size[1]))
    noise = np.random.default_rng(3).integers(0, 20, (*columns.shape, 3))
    ramps = np.stack([columns * 2, rows * 3, columns + rows], axis=-1)
    return Image.fromarray((ramps + noise).clip(0, 255).astype(np.uint8))


# What stored pixels look like for each EXIF orientation: the operation that undoes making the picture upright.
STORED = {
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}
ROTATIONS = ["none", "none+mirror", "180", "180+mirror", "90+mirror", "90", "270+mirror", "270"]


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF", "TIFF-LZW", "AVIF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation(kind: str, orientation: int) -> None:
    upright = quartered()
    stored = upright if STORED[orientation] is None else upright.transpose(STORED[orientation])
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    options = {"lossless": True} if kind == "WEBP" else {"compression": "tiff_lzw"} if kind == "TIFF-LZW" else {}
    picture = open_picture(encode(stored, kind.partition("-")[0], exif=exif, **options), "picture", CONFIG)
    assert picture.rotation == ROTATIONS[orientation - 1]
    assert picture.decoded == stored.size
    assert picture.image.size == upright.size
    assert corners(picture.image) == corners(upright)
    if kind not in ("JPEG", "AVIF"):
        assert picture.image.tobytes() == upright.tobytes()


def test_rotation_reads_as_turned_clockwise_then_mirrored() -> None:
    for orientation, stored in STORED.items():
        turn, _, mirror = ROTATIONS[orientation - 1].partition("+")
        image = quartered() if stored is None else quartered().transpose(stored)
        image = image.rotate(-int(turn.replace("none", "0")), expand=True)
        assert corners(image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirror else image) == corners(quartered())


def test_damaged_orientation_does_not_kill_a_good_picture() -> None:
    upright = quartered()
    for exif in (b"Exif\0\0garbage", b"Exif\0\0II*\0\xff\xff\xff\x7f", b"Exif\0\0MM\0*\0\0\0\x08\xff\xff" + b"\0" * 40):
        picture = open_picture(encode(upright, "PNG", exif=exif), "picture", CONFIG)
        assert picture.rotation == "none"
        assert picture.image.tobytes() == upright.tobytes()
    exif_data = Image.Exif()
    exif_data[ExifTags.Base.Orientation] = 77
    assert open_picture(encode(upright, "JPEG", exif=exif_data), "picture", CONFIG).rotation == "none"


def test_orientation_behind_the_pixels_of_a_png() -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 3
    body = exif.tobytes()[6:]
    chunk = struct.pack(">I", len(body)) + b"eXIf" + body + struct.pack(">I", zlib.crc32(b"eXIf" + body))
    data = encode(quartered().transpose(Image.Transpose.ROTATE_180), "PNG")
    assert corners(opened(data[:-12] + chunk + data[-12:])) == corners(quartered())


def noise_behind_a_square() -> tuple[Image.Image, Image.Image]:
    """An RGBA picture with random colours under full transparency and one opaque square; and what it looks like."""
    values = np.random.default_rng(5).integers(0, 256, (40, 40, 4), np.uint8)
    values[..., 3] = 0
    values[10:20, 5:30] = (10, 20, 200, 255)
    expected = np.full((40, 40, 3), 255, np.uint8)
    expected[10:20, 5:30] = (10, 20, 200)
    return Image.fromarray(values), Image.fromarray(expected)


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF"])
def test_transparency_is_white(kind: str) -> None:
    image, expected = noise_behind_a_square()
    options = {"lossless": True, "exact": True} if kind == "WEBP" else {}
    assert opened(encode(image, kind, **options)).tobytes() == expected.tobytes()


def test_half_transparency_mixes_with_white() -> None:
    image = Image.new("RGBA", (8, 8), (0, 100, 200, 51))
    pixel = opened(encode(image, "PNG")).getpixel((3, 3))
    assert pixel == (204, 224, 244)  # 255 * 0.8 + value * 0.2


def test_grey_with_alpha() -> None:
    image = Image.new("LA", (8, 8), (30, 0))
    image.putpixel((2, 2), (30, 255))
    flat = opened(encode(image, "PNG"))
    assert flat.getpixel((2, 2)) == (30, 30, 30)
    assert flat.getpixel((3, 3)) == WHITE


def test_palette_with_a_table_of_transparency() -> None:
    image = Image.new("P", (16, 16), 1)
    image.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    image.paste(0, (0, 0, 4, 4))
    image.paste(2, (8, 8, 16, 16))
    flat = opened(encode(image, "PNG", transparency=bytes([255, 0, 51])))
    assert flat.getpixel((1, 1)) == RED
    assert flat.getpixel((6, 6)) == WHITE
    assert flat.getpixel((12, 12)) == (204, 204, 255)
    single = opened(encode(image, "PNG", transparency=0))
    assert single.getpixel((1, 1)) == WHITE
    assert single.getpixel((6, 6)) == GREEN
    assert opened(encode(image, "PNG")).getpixel((12, 12)) == BLUE


def test_one_transparent_colour_of_grey_and_rgb() -> None:
    grey = Image.new("L", (8, 8), 90)
    grey.putpixel((1, 1), 40)
    flat = opened(encode(grey, "PNG", transparency=90))
    assert flat.getpixel((1, 1)) == (40, 40, 40)
    assert flat.getpixel((5, 5)) == WHITE
    colour = Image.new("RGB", (8, 8), (1, 2, 3))
    colour.putpixel((1, 1), RED)
    flat = opened(encode(colour, "PNG", transparency=(1, 2, 3)))
    assert flat.getpixel((1, 1)) == RED
    assert flat.getpixel((5, 5)) == WHITE


@pytest.mark.parametrize("mode", ["L", "1"])
def test_grey_has_three_equal_channels(mode: str) -> None:
    image = quartered().convert(mode)
    assert opened(encode(image, "PNG")).tobytes() == image.convert("L").convert("RGB").tobytes()


def png(width: int, height: int, depth: int, colour: int, rows: bytes, extra: bytes = b"") -> bytes:
    """A PNG written chunk by chunk, for what Pillow's writer cannot make."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    tail = extra + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + tail


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "TIFF-big-endian"])
def test_sixteen_bits_are_scaled_not_clipped(kind: str) -> None:
    values = np.array([[0, 128, 129, 257, 32767, 32768, 65000, 65535]], np.uint16)
    if kind == "TIFF-big-endian":
        image = Image.frombytes("I;16B", (8, 1), values.astype(">u2").tobytes())
    else:
        image = Image.fromarray(values)
    flat = np.asarray(opened(encode(image, kind[:4].rstrip("-"))))
    assert flat[0, :, 0].tolist() == [0, 0, 1, 1, 127, 128, 253, 255]  # value / 257, rounded
    assert (flat[..., 0] == flat[..., 1]).all()
    assert (flat[..., 0] == flat[..., 2]).all()


def test_sixteen_bit_colour_and_transparency_of_png() -> None:
    row = b"\0" + struct.pack(">6H", 65535, 32768, 0, 0x1234, 0x5678, 0x9ABC)
    assert np.asarray(opened(png(2, 1, 16, 2, row))).tolist() == [[[255, 128, 0], [0x12, 0x56, 0x9A]]]
    body = struct.pack(">3H", 0x1234, 0x5678, 0x9ABC)
    transparent = struct.pack(">I", 6) + b"tRNS" + body + struct.pack(">I", zlib.crc32(b"tRNS" + body))
    assert np.asarray(opened(png(2, 1, 16, 2, row, transparent))).tolist() == [[[255, 128, 0], [255, 255, 255]]]
    grey = b"\0" + struct.pack(">3H", 1000, 65535, 1001)
    body = struct.pack(">H", 1000)
    transparent = struct.pack(">I", 2) + b"tRNS" + body + struct.pack(">I", zlib.crc32(b"tRNS" + body))
    assert np.asarray(opened(png(3, 1, 16, 0, grey, transparent)))[0, :, 0].tolist() == [255, 255, 4]


def tiff_tags(data: bytes, **changed: int) -> bytes:
    """Overwrite inline values of a little-endian TIFF's first directory."""
    edited = bytearray(data)
    start = struct.unpack_from("<I", data, 4)[0]
    for index in range(struct.unpack_from("<H", data, start)[0]):
        entry = start + 2 + 12 * index
        name = f"tag{struct.unpack_from('<H', data, entry)[0]}"
        if name in changed:
            struct.pack_into("<I", edited, entry + 8, changed[name])
    return bytes(edited)


def test_twelve_bits_and_white_is_zero_of_tiff() -> None:
    data = encode(Image.fromarray(np.array([[0, 0x0FFF]], np.uint16)), "TIFF")
    assert np.asarray(opened(tiff_tags(data, tag262=0)))[0, :, 0].tolist() == [255, 239]
    packed = bytearray(tiff_tags(data, tag258=12))
    offset = data.index(b"\x00\x00\xff\x0f", 8)
    packed[offset : offset + 3] = bytes([0x80, 0x0F, 0xFF])  # 2048 and 4095 in three bytes
    assert np.asarray(opened(bytes(packed)))[0, :, 0].tolist() == [128, 255]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.array([[0.0, 0.5, 1.0]], np.float32), [0, 128, 255]),
        (np.array([[0.0, 17.2, 255.0]], np.float32), [0, 17, 255]),
        (np.array([[-1.0, 0.0, 3.0]], np.float32), [0, 64, 255]),
        (np.array([[7.0e30, 7.0e30, 7.0e30]], np.float32), [0, 0, 0]),
        (np.array([[0, 17, 255]], np.int32), [0, 17, 255]),
        (np.array([[-1000, 0, 3000]], np.int32), [0, 64, 255]),
        (np.array([[0, 1_000_000, 2_000_000]], np.int32), [0, 128, 255]),
    ],
    ids=["unit", "bytes", "stretched", "flat", "int-bytes", "int-negative", "int-large"],
)
def test_32_bit_pixels(values: np.ndarray, expected: list[int]) -> None:
    assert np.asarray(opened(encode(Image.fromarray(values), "TIFF")))[0, :, 0].tolist() == expected


def test_unsigned_32_bit_pixels() -> None:
    data = encode(Image.fromarray(np.array([[0, -1]], np.int32)), "TIFF")
    assert np.asarray(opened(tiff_tags(data, tag339=1)))[0, :, 0].tolist() == [0, 255]


def test_pixels_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(ImageError, match="not finite"):
        opened(encode(Image.fromarray(np.array([[0.0, np.nan]], np.float32)), "TIFF"))


def test_cmyk_jpeg() -> None:
    flat = opened(encode(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "JPEG", quality=100))
    assert corners(flat) == [RED] * 4


def test_other_modes() -> None:
    flat = opened(encode(Image.new("LAB", (16, 16), (200, 128, 128)), "TIFF"))
    red, green, blue = flat.getpixel((3, 3))  # type: ignore[misc]
    assert max(red, green, blue) - min(red, green, blue) < 8
    assert red > 180
    assert corners(opened(encode(Image.new("YCbCr", (16, 16), (255, 128, 128)), "TIFF"))) == [WHITE] * 4


def test_webp() -> None:
    image = quartered((40, 40))
    assert opened(encode(image, "WEBP", lossless=True)).tobytes() == image.tobytes()
    lossy = open_picture(encode(image, "WEBP"), "picture", CONFIG)
    assert lossy.format == "WebP"
    assert corners(lossy.image) == corners(image)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF", "AVIF"])
def test_the_first_of_several_frames_or_pages(kind: str) -> None:
    frames = [Image.new("RGB", (20, 10), colour) for colour in (RED, GREEN, BLUE)]
    data = encode(frames[0], kind, save_all=True, append_images=frames[1:])
    with Image.open(io.BytesIO(data)) as several:
        assert several.n_frames == 3  # type: ignore[attr-defined]
    picture = open_picture(data, "picture", CONFIG)
    assert picture.image.size == (20, 10)
    assert corners(picture.image) == [RED] * 4


def test_transparent_gif() -> None:
    image = Image.new("P", (12, 12), 0)
    image.putpalette([0, 0, 0, 255, 0, 0])
    image.paste(1, (0, 0, 6, 12))
    flat = opened(encode(image, "GIF", transparency=0))
    assert flat.getpixel((2, 2)) == RED
    assert flat.getpixel((9, 9)) == WHITE


def test_the_declared_size_of_a_picture_is_its_own() -> None:
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP", "AVIF"):
        header = read_header(encode(photo(), kind), "picture")
        assert header.size == (97, 61)
        assert header.format.upper() == kind
        assert header.format in accepted_formats()


HEIC = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + b"\0" * 200


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "is empty"),
        (b"hello", "no picture format"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'><rect/></svg>", "SVG"),
        (b"\xef\xbb\xbf <?xml version='1.0'?>\n<!-- made by hand -->\n<svg/>", "SVG"),
        (b"%PDF-1.7\n", "PDF"),
        (b"<!DOCTYPE html><html></html>", "HTML"),
        (b"\0\0\0\x0cJXL \r\n\x87\n", "JPEG XL"),
        (b"\0\0\0\x20ftypisom" + b"\0" * 40, "no picture format"),
    ],
    ids=["empty", "text", "svg", "svg-xml", "pdf", "html", "jxl", "mp4"],
)
def test_other_formats_are_refused_by_name(data: bytes, reason: str) -> None:
    with pytest.raises(ImageError, match=rf"^page 3: .*{reason}.*accepted are JPEG, PNG, WebP") as caught:
        open_picture(data, "page 3", CONFIG)
    assert caught.value.param == "page 3"
    assert caught.value.code == "unsupported_image_format"


def test_heic_is_read_where_its_library_is(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = io.BytesIO()
    pillow_heif.from_pillow(quartered()).save(buffer, quality=-1)
    picture = open_picture(buffer.getvalue(), "picture", CONFIG)
    assert (picture.format, picture.decoded, picture.rotation) == ("HEIC", (64, 32), "none")
    assert corners(picture.image) == corners(quartered())
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    for data in (HEIC, buffer.getvalue()):
        with pytest.raises(ImageError, match=r"HEIC; accepted are JPEG, .*kaminari-core\[heif\]") as caught:
            open_picture(data, "page 3", CONFIG)
        assert caught.value.code == "unsupported_image_format"


def test_avif_behind_a_heif_brand() -> None:
    assert sniff(b"\0\0\0\x1cftypmif1\0\0\0\0mif1avifmiaf") == "AVIF"


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "JPEG-progressive", "WEBP", "GIF", "TIFF", "TIFF-LZW", "BMP", "AVIF"])
def test_a_cut_off_file_is_refused_or_whole(kind: str) -> None:
    options: dict[str, object] = {
        "JPEG-progressive": {"progressive": True},
        "TIFF-LZW": {"compression": "tiff_lzw"},
    }.get(kind, {})
    data = encode(photo(), kind.partition("-")[0], **options)
    whole = opened(data).tobytes()
    cuts = sorted({*range(0, len(data), max(1, len(data) // 60)), *range(len(data) - 12, len(data))})
    outcomes = [pixels_or_none(data[:cut]) for cut in cuts]
    assert set(outcomes) <= {None, whole}
    assert outcomes.count(None) >= 60


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP", "AVIF"])
def test_damaged_files_never_end_in_another_error(kind: str) -> None:
    data = encode(photo((40, 30)), kind)
    draw = random.Random(11)
    small = EngineConfig(max_image_pixels=1_000_000)
    for _ in range(150):
        damaged = bytearray(data)
        for _ in range(draw.randint(1, 6)):
            damaged[draw.randrange(min(len(damaged), 400) if draw.random() < 0.7 else len(damaged))] = draw.randrange(
                256
            )
        pixels_or_none(bytes(damaged), small)  # raises what is no ImageError


def test_a_picture_without_pixels_is_refused() -> None:
    for width, height in ((0, 5), (5, 0), (0, 0)):
        with pytest.raises(ImageError):
            opened(png(width, height, 8, 0, b"\0" * 5))


@pytest.mark.parametrize("size", [(1, 1), (1, 2), (2, 1), (257, 27), (27, 257)])
def test_tiny_pictures_open(size: tuple[int, int]) -> None:
    assert opened(encode(Image.new("RGB", size, RED), "PNG")).size == size


def test_limits_name_what_there_is_and_what_is_allowed() -> None:
    config = EngineConfig(max_images=2, max_image_pixels=1000, max_request_pixels=1500)

    def headers(*sizes: tuple[int, int]) -> list:
        return [
            read_header(encode(Image.new("L", size), "PNG"), f"content[{index}]") for index, size in enumerate(sizes)
        ]

    check_limits(headers((25, 40), (25, 20)), config)
    with pytest.raises(ImageError, match=r"3 pictures.* 2 ") as caught:
        check_limits(headers((5, 5), (5, 5), (5, 5)), config)
    assert (caught.value.param, caught.value.code) == ("content[2]", "too_many_images")
    with pytest.raises(ImageError, match=r"content\[1\].*25 x 41 .*1,000 ") as caught:
        check_limits(headers((5, 5), (25, 41)), config)
    assert (caught.value.param, caught.value.code) == ("content[1]", "image_too_large")
    with pytest.raises(ImageError, match=r"content\[1\].*1,500 ") as caught:
        check_limits(headers((25, 40), (25, 21)), config)
    assert (caught.value.param, caught.value.code) == ("content[1]", "image_too_large")


def tiled_tiff(tile: int) -> bytes:
    """An 8-bit grey TIFF of 32 x 32 pixels in one deflated tile, which Pillow's writer cannot make."""
    pixels = zlib.compress(bytes(range(256)) * 4)
    values = {256: 32, 257: 32, 258: 8, 259: 8, 262: 1, 277: 1, 322: tile, 323: tile, 324: 8, 325: len(pixels)}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in values.items())
    directory = struct.pack("<H", len(values)) + entries + bytes(4)
    return b"II*\0" + struct.pack("<I", 8 + len(pixels)) + pixels + directory


def test_a_huge_tile_of_a_small_picture_is_refused() -> None:
    assert np.asarray(opened(tiled_tiff(32)))[0, :4, 0].tolist() == [0, 1, 2, 3]
    with pytest.raises(ImageError, match="max-image-pixels"):
        opened(tiled_tiff(60_000))


def test_pillows_globals_are_left_alone_and_do_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES
    data = {kind: encode(photo(), kind) for kind in ("PNG", "JPEG", "GIF", "BMP")}
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    for file in data.values():
        assert opened(file).size == (97, 61)
    assert Image.MAX_IMAGE_PIXELS == 100
    monkeypatch.undo()
    assert limits == (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES)


HOSTILE = """
import io, resource, struct, sys, zlib
from PIL import Image
limits = Image.MAX_IMAGE_PIXELS
from kaminari_core.config import EngineConfig
from kaminari_core.errors import ImageError
from kaminari_core.images import check_limits, read_header
assert limits == Image.MAX_IMAGE_PIXELS
config = EngineConfig()
files = []
for side, copies in ((16_000, 4), (7_900, 3)):
    packed = io.BytesIO()
    Image.new("1", (side, side)).save(packed, "PNG")
    files.append([packed.getvalue()] * copies)
webp = b"VP8X" + struct.pack("<I", 10) + bytes(4) + (16_000).to_bytes(3, "little") * 2
webp += b"VP8L" + struct.pack("<I", 6) + b"\\x2f" + struct.pack("<I", 15_999 | 15_999 << 14) + b"\\0"
files.append([b"RIFF" + struct.pack("<I", len(webp) + 4) + b"WEBP" + webp])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
refused = 0
for group in files:
    try:
        check_limits([read_header(data, "picture") for data in group], config)
    except ImageError as error:
        print(error)
        refused += 1
print(refused, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_hostile_headers_cost_no_memory() -> None:
    result = subprocess.run([sys.executable, "-c", HOSTILE], capture_output=True, text=True, check=True)
    refused, kibibytes = map(int, result.stdout.split()[-2:])
    assert refused == 3, result.stdout
    assert kibibytes < 20_000, result.stdout


def test_pictures_open_alike_in_many_threads() -> None:
    from concurrent.futures import ThreadPoolExecutor

    files = [encode(photo((50 + index, 40)), kind) for index, kind in enumerate(("PNG", "JPEG", "WEBP", "GIF", "TIFF"))]
    alone = [opened(file).tobytes() for file in files]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda file: opened(file).tobytes(), itertools.chain(*[files] * 8)))
    assert together == alone * 8
