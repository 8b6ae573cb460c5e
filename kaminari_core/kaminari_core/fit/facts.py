"""What a model package tells the memory plan about a checkpoint: frozen numbers, nothing to call.

A package makes them from config.json alone (see `ModelSpec.footprint`), so that they can be had for a checkpoint that has not
been downloaded yet.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["vision", "embedding", "linear", "other", "head"]
"""`linear` is what a quantizer converts: the attention and MLP products of the decoder. `other` is norms, routers and experts."""
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor by its name in the checkpoint's files. `draft` marks those of a draft head, loaded for `--draft mtp` only."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    draft: bool = False

    @property
    def elements(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureFootprint:
    """Pictures: `unit` is the side of one visual token in pixels, `patches` how many patches it is made of, `patch_values` how
    many float32 values a prepared patch has.

    `tower` says how many bytes per patch are alive at the worst moment of the vision tower, by the bytes of an element of the
    dtype that it computes in (2 and 4); attention must not grow with the square of the patches. `rows` is how many rows of the
    decoder's hidden size each prompt position has before the decoder runs: 1, and one more for each later layer at which
    features are added. `least` and `most` bound the visual tokens of one picture; `most` is None where config.json cannot tell.
    """

    unit: int
    patches: int
    patch_values: int
    tower: Mapping[int, int]
    rows: int = 1
    least: int = 1
    most: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """The sizes of one checkpoint. `tensors` are all that loading reads; those that are tied to another are left out.

    `intermediate` is the width of the widest MLP as one token sees it. `draft_layers` counts the layers of a draft head, whose
    keys and values lie in the cache. `picture` is None for a text-only model.
    """

    tensors: tuple[StoredTensor, ...]
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    max_positions: int
    draft_layers: int = 0
    picture: PictureFootprint | None = None

    @property
    def parameters(self) -> int:
        """All numbers in the checkpoint but those of a draft head."""
        return sum(tensor.elements for tensor in self.tensors if not tensor.draft)
