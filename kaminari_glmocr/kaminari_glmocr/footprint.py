"""GLM-OCR in the memory plan: the tensors that its config.json implies, and what its vision tower needs while it runs.

The tensors are those of `weights.py` under the checkpoint's names; imports stay light, because the plan is made before anything
is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kaminari_core.fit import Footprint, PictureFootprint, StoredTensor
from kaminari_core.settings import Section, read_limits
from kaminari_glmocr.config import TextConfig, VisionConfig, read_sizes

_TEXT, _VISION = "model.language_model.", "model.visual."


def footprint(directory: Path) -> Footprint:
    """The sizes of a checkpoint directory, of which config.json must be there. Raises CheckpointError for what it lacks."""
    text, vision = read_sizes(directory)
    least, most = read_limits(directory, frames=True)
    return Footprint(
        tensors=(*_decoder(text), *_draft(text), *_vision(vision)),
        layers=text.layers,
        hidden=text.hidden,
        intermediate=text.intermediate,
        heads=text.heads,
        kv_heads=text.kv_heads,
        head_dim=text.head_dim,
        vocabulary=text.vocabulary,
        max_positions=text.max_positions,
        draft_layers=text.draft_layers,
        picture=PictureFootprint(
            unit=vision.patch_size * vision.merge_size,
            patches=vision.merge_size**2,
            patch_values=vision.channels * vision.temporal_patch_size * vision.patch_size**2,
            tower={size: _tower_bytes(vision, size) for size in (2, 4)},
            least=least,
            most=most,
        ),
    )


def _decoder(text: TextConfig) -> Iterator[StoredTensor]:
    yield StoredTensor(_TEXT + "embed_tokens.weight", (text.vocabulary, text.hidden), "embedding")
    yield StoredTensor(_TEXT + "norm.weight", (text.hidden,), "other")
    if not text.tied:
        yield StoredTensor("lm_head.weight", (text.vocabulary, text.hidden), "head")
    for index in range(text.layers):
        yield from _block(index, text)


def _draft(text: TextConfig) -> Iterator[StoredTensor]:
    """The multi-token prediction layers, each a whole block with tensors of its own beside it."""
    hidden = text.hidden
    for index in range(text.layers, text.layers + text.draft_layers):
        layer = f"{_TEXT}layers.{index}."
        yield from _block(index, text, draft=True)
        yield StoredTensor(layer + "eh_proj.weight", (hidden, 2 * hidden), "linear", draft=True)
        for name in ("enorm", "hnorm", "shared_head.norm"):
            yield StoredTensor(f"{layer}{name}.weight", (hidden,), "other", draft=True)
        yield StoredTensor(layer + "embed_tokens.weight", (text.vocabulary, hidden), "embedding", draft=True)
        yield StoredTensor(layer + "shared_head.head.weight", (text.vocabulary, hidden), "head", draft=True)


def _block(index: int, text: TextConfig, *, draft: bool = False) -> Iterator[StoredTensor]:
    layer = f"{_TEXT}layers.{index}."
    hidden, q, kv = text.hidden, text.heads * text.head_dim, text.kv_heads * text.head_dim
    for name, rows in (("q", q), ("k", kv), ("v", kv)):
        yield StoredTensor(f"{layer}self_attn.{name}_proj.weight", (rows, hidden), "linear", draft)
    yield StoredTensor(layer + "self_attn.o_proj.weight", (hidden, q), "linear", draft)
    yield StoredTensor(layer + "mlp.gate_up_proj.weight", (2 * text.intermediate, hidden), "linear", draft)
    yield StoredTensor(layer + "mlp.down_proj.weight", (hidden, text.intermediate), "linear", draft)
    for name in ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"):
        yield StoredTensor(f"{layer}{name}.weight", (hidden,), "other", draft)


def _vision(vision: VisionConfig) -> Iterator[StoredTensor]:
    settings = Section("vision_config", vision.settings)
    hidden, intermediate = settings.get("hidden_size", int), settings.get("intermediate_size", int)
    out, side = vision.out_hidden, vision.patch_size
    biased = settings.get("attention_bias", bool)
    yield from _layer("patch_embed.proj", (hidden, vision.channels, vision.temporal_patch_size, side, side))
    for index in range(settings.get("depth", int)):
        block = f"blocks.{index}."
        yield _tensor(block + "norm1.weight", (hidden,))
        yield _tensor(block + "norm2.weight", (hidden,))
        yield from _layer(block + "attn.qkv", (3 * hidden, hidden), biased=biased)
        yield from _layer(block + "attn.proj", (hidden, hidden), biased=biased)
        for name in ("q_norm", "k_norm"):
            yield _tensor(f"{block}attn.{name}.weight", (hidden // settings.get("num_heads", int),))
        for name in ("gate_proj", "up_proj"):
            yield from _layer(f"{block}mlp.{name}", (intermediate, hidden), biased=biased)
        yield from _layer(block + "mlp.down_proj", (hidden, intermediate), biased=biased)
    yield _tensor("post_layernorm.weight", (hidden,))
    yield from _layer("downsample", (out, hidden, vision.merge_size, vision.merge_size))
    yield _tensor("merger.proj.weight", (out, out))
    yield from _layer("merger.post_projection_norm", (out,))
    for name in ("gate_proj", "up_proj"):
        yield _tensor(f"merger.{name}.weight", (out * vision.channels, out))
    yield _tensor("merger.down_proj.weight", (out, out * vision.channels))


def _layer(name: str, shape: tuple[int, ...], *, biased: bool = True) -> Iterator[StoredTensor]:
    yield _tensor(name + ".weight", shape)
    if biased:
        yield _tensor(name + ".bias", shape[:1])


def _tensor(name: str, shape: tuple[int, ...]) -> StoredTensor:
    return StoredTensor(_VISION + name, shape, "vision")


def _tower_bytes(vision: VisionConfig, size: int) -> int:
    """Bytes per patch at the worst moment of the tower, in a dtype of `size` bytes.

    There are three candidates. Patches are cast before they are embedded; rotating queries and keys is done in float32, beside
    the unrotated ones; the gated MLP holds its intermediate three times. cos and sin in float32 stay alive meanwhile.
    """
    settings = Section("vision_config", vision.settings)
    hidden, intermediate = settings.get("hidden_size", int), settings.get("intermediate_size", int)
    cast = 4 if size < 4 else 0
    values = vision.channels * vision.temporal_patch_size * vision.patch_size**2
    embedding = hidden * size + (values * size if cast else 0)
    kept = 2 * 4 * hidden // settings.get("num_heads", int)
    rotation = hidden * (7 * size + cast + 4 * 4) + kept
    mlp = 3 * hidden * size + 3 * intermediate * size + kept
    return max(embedding, rotation, mlp)
