"""The port against the class of transformers, in fp32 on a CPU: same tokens, logits within 1e-4; and proof that it can fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from kaminari_core.flow import Prepared, Request
from kaminari_core.parity import assert_same, greedy
from kaminari_core.rope import half_split_table, interleaved_axes, rotate_half_split
from kaminari_glmocr.model import GlmOcr
from kaminari_glmocr.reference import StockGlmOcr

STEPS = 41  # the prefill's token and 40 decode steps


@pytest.mark.parametrize("chunk", [None, 7])
def test_logits_and_tokens_equal_the_reference(
    model: GlmOcr, reference: StockGlmOcr, conversation: Request, chunk: int | None
) -> None:
    prepared = model.prepare(conversation)
    theirs = reference.greedy(prepared, STEPS, logits=True)
    assert_same(greedy(model, prepared, STEPS, chunk=chunk), theirs)


def test_the_draft_head_changes_nothing_of_the_decoder(model: GlmOcr, drafting: GlmOcr, conversation: Request) -> None:
    prepared = model.prepare(conversation)
    plain = greedy(model, prepared, STEPS, chunk=5)
    assert_same(greedy(drafting, prepared, STEPS, chunk=5), plain, tolerance=0.0)


def test_compiled_decode_equals_the_reference(
    model: GlmOcr, reference: StockGlmOcr, ask: Callable[..., Request]
) -> None:
    prepared = model.prepare(ask((96, 64), "Text Recognition:"))
    theirs = reference.greedy(prepared, 12, logits=True)
    assert_same(greedy(model, prepared, 12, compile=True), theirs)


def test_replies_vary_and_have_margins(model: GlmOcr, reference: StockGlmOcr, ask: Callable[..., Request]) -> None:
    # A reply of one repeated token, or logits that nearly tie, would make equality of tokens say little.
    run = reference.greedy(model.prepare(ask((200, 150), "Text Recognition:")), STEPS, logits=True)
    assert run.logits is not None
    best = run.logits.topk(2).values
    assert len(set(run.tokens)) > 12
    assert float((best[:, 0] - best[:, 1]).median()) > 0.1


def text_positions(prepared: Prepared) -> Prepared:
    positions = torch.arange(prepared.length).expand(3, -1)
    return replace(prepared, positions=positions, next_position=prepared.length)


def decode_without_offset(prepared: Prepared) -> Prepared:
    return replace(prepared, next_position=prepared.length)


def rows_and_columns_swapped(prepared: Prepared) -> Prepared:
    return replace(prepared, positions=prepared.positions[[0, 2, 1]])


def patches_in_raster_order(prepared: Prepared) -> Prepared:
    (patches,) = prepared.patches
    _, rows, columns = patches.grid
    blocks = patches.values.view(rows // 2, columns // 2, 2, 2, -1)
    return replace(prepared, patches=(replace(patches, values=blocks.transpose(1, 2).reshape(rows * columns, -1)),))


@pytest.mark.parametrize(
    "mutation", [text_positions, decode_without_offset, rows_and_columns_swapped, patches_in_raster_order]
)
def test_wrong_inputs_are_noticed(
    model: GlmOcr,
    reference: StockGlmOcr,
    ask: Callable[..., Request],
    mutation: Callable[[Prepared], Prepared],
) -> None:
    prepared = model.prepare(ask((200, 150), "Text Recognition:"))
    theirs = reference.greedy(prepared, STEPS, logits=True)
    with pytest.raises(AssertionError, match="tokens differ"):
        assert_same(greedy(model, mutation(prepared), STEPS), theirs)


def section_layout(model: GlmOcr, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(model.network.decoder, "_axes", interleaved_axes((6, 5, 5)))


def rotation(model: GlmOcr, patch: pytest.MonkeyPatch) -> None:
    decoder = model.network.decoder
    patch.setattr(decoder, "_table", half_split_table)
    for layer in decoder.layers:
        patch.setattr(layer.attention, "rotation", rotate_half_split)
    patch.setattr(decoder, "_scalar", None)
    decoder.set_rotary(decoder._frequencies, 512, torch.float32)


def gate_and_up_swapped(model: GlmOcr, patch: pytest.MonkeyPatch) -> None:
    def swapped(mlp: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        gate, up = mlp.gate_up_proj(x).chunk(2, dim=-1)
        return mlp.down_proj(torch.nn.functional.silu(up) * gate)

    for layer in model.network.decoder.layers:
        patch.setattr(layer.mlp, "forward", partial(swapped, layer.mlp))


def norms_by_their_names(model: GlmOcr, patch: pytest.MonkeyPatch) -> None:
    """`post_attention_layernorm` behind the attention, where its name seems to put it."""
    for layer in model.network.decoder.layers:
        behind, before = layer.post_self_attn_layernorm.forward, layer.post_attention_layernorm.forward
        patch.setattr(layer.post_self_attn_layernorm, "forward", before)
        patch.setattr(layer.post_attention_layernorm, "forward", behind)


def no_norms_behind(model: GlmOcr, patch: pytest.MonkeyPatch) -> None:
    """A plain pre-norm block, as most decoders have it."""
    for layer in model.network.decoder.layers:
        for norm in (layer.post_self_attn_layernorm, layer.post_mlp_layernorm):
            patch.setattr(norm, "forward", lambda x: x)


@pytest.mark.parametrize(
    "mutation", [section_layout, rotation, gate_and_up_swapped, norms_by_their_names, no_norms_behind]
)
def test_wrong_arithmetic_is_noticed(
    model: GlmOcr,
    reference: StockGlmOcr,
    ask: Callable[..., Request],
    mutation: Callable[[GlmOcr, pytest.MonkeyPatch], None],
) -> None:
    prepared = model.prepare(ask((200, 150), "Text Recognition:"))
    theirs = reference.greedy(prepared, STEPS, logits=True)
    with pytest.MonkeyPatch.context() as patch:
        mutation(model, patch)
        with pytest.raises(AssertionError, match="tokens differ"):
            assert_same(greedy(model, prepared, STEPS), theirs)
    assert_same(greedy(model, prepared, STEPS), theirs)
