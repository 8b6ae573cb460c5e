"""Qwen3-VL in the memory plan: the tensors that its config.json implies, and what its vision tower needs while it runs.

The tensors are those of `weights.py` under the checkpoint's names; imports stay light, because the plan is made before anything
is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kaminari_core.fit import Footprint, PictureFootprint, StoredTensor
from kaminari_core.settings import Section, read_limits
from kaminari_qwen3vl.config import TextConfig, VisionConfig, read_sizes

_TEXT, _VISION = "model.language_model.", "model.visual."


def footprint(directory: Path) -> Footprint:
    """The sizes of a checkpoint directory, of which config.json must be there. Raises CheckpointError for what it lacks."""
    text, vision = read_sizes(directory)
    least, most = read_limits(directory)
    return Footprint(
        tensors=(*_decoder(text), *_vision(vision)),
        layers=text.layers,
        hidden=text.hidden,
        intermediate=max(text.intermediate, text.experts.active * text.experts.intermediate if text.experts else 0),
        heads=text.heads,
        kv_heads=text.kv_heads,
        head_dim=text.head_dim,
        vocabulary=text.vocabulary,
        max_positions=text.max_positions,
        picture=PictureFootprint(
            unit=vision.patch_size * vision.merge_size,
            patches=vision.merge_size**2,
            patch_values=vision.channels * vision.temporal_patch_size * vision.patch_size**2,
            tower={size: _tower_bytes(vision, size) for size in (2, 4)},
            rows=1 + len(vision.deepstack_layers),
            least=least,
            most=most,
        ),
    )


def _decoder(text: TextConfig) -> Iterator[StoredTensor]:
    hidden, q, kv = text.hidden, text.heads * text.head_dim, text.kv_heads * text.head_dim
    yield StoredTensor(_TEXT + "embed_tokens.weight", (text.vocabulary, hidden), "embedding")
    yield StoredTensor(_TEXT + "norm.weight", (hidden,), "other")
    if not text.tied:
        yield StoredTensor("lm_head.weight", (text.vocabulary, hidden), "head")
    for index in range(text.layers):
        layer = f"{_TEXT}layers.{index}."
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            yield StoredTensor(f"{layer}self_attn.{name}_proj.weight", (rows, hidden), "linear")
        yield StoredTensor(layer + "self_attn.o_proj.weight", (hidden, q), "linear")
        for name in ("q_norm", "k_norm"):
            yield StoredTensor(f"{layer}self_attn.{name}.weight", (text.head_dim,), "other")
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield StoredTensor(f"{layer}{name}.weight", (hidden,), "other")
        yield from _mlp(layer + "mlp.", text, index)


def _mlp(prefix: str, text: TextConfig, index: int) -> Iterator[StoredTensor]:
    hidden, experts = text.hidden, text.experts
    if experts is None or index not in experts.layers:
        for name in ("gate_proj", "up_proj"):
            yield StoredTensor(f"{prefix}{name}.weight", (text.intermediate, hidden), "linear")
        yield StoredTensor(prefix + "down_proj.weight", (hidden, text.intermediate), "linear")
        return
    yield StoredTensor(prefix + "gate.weight", (experts.count, hidden), "other")
    yield StoredTensor(prefix + "experts.gate_up_proj", (experts.count, hidden, 2 * experts.intermediate), "other")
    yield StoredTensor(prefix + "experts.down_proj", (experts.count, experts.intermediate, hidden), "other")


def _vision(vision: VisionConfig) -> Iterator[StoredTensor]:
    settings = Section("vision_config", vision.settings)
    hidden, intermediate = settings.get("hidden_size", int), settings.get("intermediate_size", int)
    merged = hidden * vision.merge_size**2
    frames, side = vision.temporal_patch_size, vision.patch_size
    yield from _layer("patch_embed.proj", (hidden, vision.channels, frames, side, side))
    yield _tensor("pos_embed.weight", (settings.get("num_position_embeddings", int), hidden))
    for index in range(settings.get("depth", int)):
        block = f"blocks.{index}."
        yield from _layer(block + "norm1", (hidden,))
        yield from _layer(block + "norm2", (hidden,))
        yield from _layer(block + "attn.qkv", (3 * hidden, hidden))
        yield from _layer(block + "attn.proj", (hidden, hidden))
        yield from _layer(block + "mlp.linear_fc1", (intermediate, hidden))
        yield from _layer(block + "mlp.linear_fc2", (hidden, intermediate))
    mergers = {"merger.": hidden} | {
        f"deepstack_merger_list.{index}.": merged for index in range(len(vision.deepstack_layers))
    }
    for merger, normed in mergers.items():
        yield from _layer(merger + "norm", (normed,))
        yield from _layer(merger + "linear_fc1", (merged, merged))
        yield from _layer(merger + "linear_fc2", (vision.out_hidden, merged))


def _layer(name: str, shape: tuple[int, ...]) -> Iterator[StoredTensor]:
    yield _tensor(name + ".weight", shape)
    yield _tensor(name + ".bias", shape[:1])


def _tensor(name: str, shape: tuple[int, ...]) -> StoredTensor:
    return StoredTensor(_VISION + name, shape, "vision")


def _tower_bytes(vision: VisionConfig, size: int) -> int:
    """Bytes per patch at the worst moment of the tower, in a dtype of `size` bytes.

    There are four candidates. Patches are cast before they are embedded; adding position embeddings interpolates four rows in
    float32 (a CPU casts them first); rotating queries and keys is done in float32; the MLP holds its intermediate twice. What
    stays alive meanwhile: the position embeddings, cos and sin in float32, and the deepstack features of earlier blocks.
    """
    settings = Section("vision_config", vision.settings)
    hidden, intermediate = settings.get("hidden_size", int), settings.get("intermediate_size", int)
    cast = 4 if size < 4 else 0
    values = vision.channels * vision.temporal_patch_size * vision.patch_size**2
    embedding = hidden * size + (values * size if cast else 0)
    features = len(vision.deepstack_layers) * vision.out_hidden * size // vision.merge_size**2
    kept = 4 * hidden + 2 * 4 * hidden // settings.get("num_heads", int) + features
    positions = hidden * (size + 4 * size + 4 * 4 + 4 * cast)
    rotation = hidden * (6 * size + cast + 4 * 4) + kept
    mlp = 3 * hidden * size + 2 * intermediate * size + kept
    return max(embedding, positions, rotation, mlp)
