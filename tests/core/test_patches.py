"""From pictures to patches, against the Pillow processors of transformers."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image
from transformers.models.glm46v.image_processing_pil_glm46v import Glm46VImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from kaminari_core.config import EngineConfig, Sizing
from kaminari_core.errors import ImageError, UsageError
from kaminari_core.flow import ImagePart
from kaminari_core.patches import ImageProcessor, fit_picture, patchify
from kaminari_core.sizing import bucket

HALF = (0.5, 0.5, 0.5)
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def qwen(sizing: Sizing = "bucket", visual_tokens: int = 512, **settings: Any) -> ImageProcessor:
    config = EngineConfig(sizing=sizing, visual_tokens=visual_tokens, **settings)
    return ImageProcessor(patch_size=16, merge_size=2, temporal_patch_size=2, mean=HALF, std=HALF, min_tokens=64,
                          max_tokens=16_384, config=config)  # fmt: skip


def glm(sizing: Sizing, visual_tokens: int) -> ImageProcessor:
    config = EngineConfig(sizing=sizing, visual_tokens=visual_tokens)
    return ImageProcessor(patch_size=14, merge_size=2, temporal_patch_size=2, mean=CLIP_MEAN, std=CLIP_STD, min_tokens=8,
                          max_tokens=6_144, widen=True, config=config)  # fmt: skip


def noise(size: tuple[int, int]) -> Image.Image:
    return Image.fromarray(np.random.default_rng(sum(size)).integers(0, 256, (size[1], size[0], 3), np.uint8))


def part(image: Image.Image, name: str = "picture", **options: Any) -> ImagePart:
    buffer = io.BytesIO()
    image.save(buffer, "PNG", **options)
    return ImagePart(buffer.getvalue(), name)


@pytest.mark.parametrize(
    ("reference", "patch", "mean", "std"),
    [(Qwen2VLImageProcessorPil, 16, HALF, HALF), (Glm46VImageProcessorPil, 14, CLIP_MEAN, CLIP_STD)],
)
def test_patches_equal_the_reference_processors(reference: Any, patch: int, mean: Any, std: Any) -> None:
    processor = reference(patch_size=patch, merge_size=2, temporal_patch_size=2, image_mean=mean, image_std=std)
    for rows, columns in ((1, 1), (2, 5), (7, 3)):
        image = noise((columns * patch * 2, rows * patch * 2))
        expected = processor(images=[image], do_resize=False, return_tensors="pt")
        patches = patchify(image, patch, 2, 2, mean, std)
        assert patches.values.dtype == torch.float32
        assert torch.equal(patches.values, expected["pixel_values"])
        assert patches.grid == tuple(expected["image_grid_thw"][0].tolist())


SIZES = [(1, 1), (1, 2), (2, 1), (257, 27), (27, 257), (640, 200), (31, 639), (500, 333), (997, 613), (30, 1400)]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_exact_sizing_equals_the_reference_processors(size: tuple[int, int]) -> None:
    image = noise(size)
    bounds = {"shortest_edge": 64 * 32**2, "longest_edge": 256 * 32**2}
    expected = Qwen2VLImageProcessorPil(patch_size=16, image_mean=HALF, image_std=HALF, size=bounds)(
        images=[image], return_tensors="pt"
    )
    (patches,), (saw,) = qwen("exact", 256).see([part(image)])
    assert patches.grid == tuple(expected["image_grid_thw"][0].tolist())
    assert torch.equal(patches.values, expected["pixel_values"])
    assert saw.visual_tokens * 4 == len(patches.values)
    bounds = {"shortest_edge": 2 * 8 * 28**2, "longest_edge": 2 * 256 * 28**2}
    expected = Glm46VImageProcessorPil(patch_size=14, image_mean=CLIP_MEAN, image_std=CLIP_STD, size=bounds)(
        images=[image], return_tensors="pt"
    )
    (patches,), (saw,) = glm("exact", 256).see([part(image)])
    assert patches.grid == tuple(expected["image_grid_thw"][0].tolist())
    assert torch.equal(patches.values, expected["pixel_values"])
    assert saw.visual_tokens * 4 == len(patches.values)


@pytest.mark.parametrize("sizing", ["bucket", "exact"])
def test_every_size_has_as_many_tokens_as_patches_say(sizing: Sizing) -> None:
    processor = qwen(sizing, 128)
    primes = (7, 17, 61, 127, 251, 509, 761, 1021)
    for width, height in [*((one, other) for one in primes for other in primes[::-1]), (64, 64), (33, 31)]:
        (patches,), (saw,) = processor.see([part(Image.new("RGB", (width, height), "red"))])
        frames, rows, columns = patches.grid
        assert (
            saw.visual_tokens == frames * rows * columns // 4 == saw.grid[0] * saw.grid[1] == len(patches.values) // 4
        )
        assert saw.visual_tokens <= 128
        assert saw.canvas == (columns * 16, rows * 16)


def test_a_picture_that_fits_keeps_every_pixel() -> None:
    image = noise((300, 280))
    layout = bucket(*image.size, 32, 64, 512)
    canvas = np.asarray(fit_picture(image, layout, Image.Resampling.LANCZOS))
    left, top, width, height = layout.content
    assert (canvas[top : top + height, left : left + width] == np.asarray(image)).all()
    outside = canvas.copy()
    outside[top : top + height, left : left + width] = 255
    assert (outside == 255).all()


def test_shrinking_uses_lanczos_on_the_content_alone() -> None:
    image = noise((3000, 1000))
    layout = bucket(*image.size, 32, 64, 512)
    left, top, width, height = layout.content
    canvas = fit_picture(image, layout, qwen().resample)
    expected = image.resize((width, height), Image.Resampling.LANCZOS)
    assert canvas.crop((left, top, left + width, top + height)).tobytes() == expected.tobytes()


def test_what_the_model_saw() -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    (patches,), (saw,) = qwen().see([part(noise((200, 640)), exif=exif)])
    assert (saw.format, saw.decoded, saw.rotation, saw.sizing) == ("PNG", (200, 640), "90", "bucket")
    assert (saw.canvas, saw.content, saw.grid) == ((1024, 256), (192, 28, 640, 200), (8, 32))
    assert (saw.visual_tokens, saw.budget, patches.grid) == (256, 512, (1, 16, 64))


def test_a_turned_picture_gives_the_patches_of_an_upright_one() -> None:
    upright = noise((64, 320))
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    (turned,), _ = qwen().see([part(upright.transpose(Image.Transpose.ROTATE_90), exif=exif)])
    (plain,), _ = qwen().see([part(upright)])
    assert torch.equal(turned.values, plain.values)


@pytest.mark.parametrize("sizing", ["bucket", "exact"])
def test_the_budget_bounds_and_is_told(sizing: Sizing) -> None:
    image = part(noise((1500, 1100)))
    counts = []
    for budget in (64, 128, 256, 512):
        _, (saw,) = qwen(sizing, budget).see([image])
        assert saw.budget == budget
        counts.append(saw.visual_tokens)
    assert counts == sorted(set(counts))
    assert counts[-1] <= 512


def test_the_processors_own_bound_holds_as_well() -> None:
    assert glm("exact", 10_000).budget == 6_144
    with pytest.raises(UsageError, match=r"32\b.*\b64\b"):
        qwen(visual_tokens=32)


def test_several_pictures_keep_their_order_and_limits_come_first() -> None:
    parts = [part(noise(size), f"content[{index}]") for index, size in enumerate([(300, 100), (100, 300), (64, 64)])]
    patches, saw = qwen().see(parts)
    assert [seen.grid for seen in patches] == [(1, seen.grid[0] * 2, seen.grid[1] * 2) for seen in saw]
    assert [seen.decoded for seen in saw] == [(300, 100), (100, 300), (64, 64)]
    assert qwen().see([]) == ((), ())
    with pytest.raises(ImageError, match="max-images") as caught:
        qwen(max_images=2).see(parts)
    assert caught.value.param == "content[2]"
    broken = ImagePart(parts[0].data[:200], "content[0]")
    with pytest.raises(ImageError, match=r"content\[1\].*max-image-pixels"):  # found before the first is decoded
        qwen(max_image_pixels=30_000).see([broken, part(noise((400, 100)), "content[1]")])


def test_extreme_ratios() -> None:
    for size in ((1, 201), (201, 1), (1, 5000)):
        image = part(Image.new("L", size), "content[3]")
        with pytest.raises(ImageError, match=r"content\[3\].*200 : 1") as caught:
            qwen("exact").see([image])
        assert caught.value.param == "content[3]"
        (patches,), (saw,) = qwen("bucket").see([image])
        assert len(patches.values) == saw.visual_tokens * 4
