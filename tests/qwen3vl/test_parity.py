"""The port against the class of transformers, in fp32 on a CPU: same tokens, logits within 1e-4; and proof that it can fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from kaminari_core.flow import Embedded, Prepared, Request
from kaminari_core.parity import assert_same, greedy
from kaminari_core.rope import contiguous_axes, pairwise_table, rotate_pairwise
from kaminari_qwen3vl.model import Qwen3VL
from kaminari_qwen3vl.reference import StockQwen3VL

STEPS = 41  # the prefill's token and 40 decode steps
Prepare = Callable[[Request], Prepared]


@pytest.mark.parametrize("kind", ["tiny", "tiny-untied", "tiny-moe"])
@pytest.mark.parametrize("chunk", [None, 7])
def test_logits_and_tokens_equal_the_reference(
    models: dict[str, Qwen3VL],
    references: dict[str, StockQwen3VL],
    conversation: Request,
    kind: str,
    chunk: int | None,
) -> None:
    prepared = models[kind].prepare(conversation)
    theirs = references[kind].greedy(prepared, STEPS, logits=True)
    assert_same(greedy(models[kind], prepared, STEPS, chunk=chunk), theirs)


@pytest.mark.parametrize("kind", ["tiny", "tiny-moe"])
def test_compiled_decode_equals_the_reference(
    models: dict[str, Qwen3VL], references: dict[str, StockQwen3VL], ask: Callable[..., Request], kind: str
) -> None:
    prepared = models[kind].prepare(ask((96, 64), "Read this."))
    theirs = references[kind].greedy(prepared, 12, logits=True)
    assert_same(greedy(models[kind], prepared, 12, compile=True), theirs)


def test_replies_vary_and_have_margins(
    references: dict[str, StockQwen3VL], models: dict[str, Qwen3VL], ask: Callable[..., Request]
) -> None:
    # A reply of one repeated token, or logits that nearly tie, would make equality of tokens say little.
    for kind, reference in references.items():
        run = reference.greedy(models[kind].prepare(ask((200, 150), "Read this.")), STEPS, logits=True)
        assert run.logits is not None
        best = run.logits.topk(2).values
        assert len(set(run.tokens)) > 12
        assert float((best[:, 0] - best[:, 1]).median()) > 0.1


def text_positions(model: Qwen3VL, prepared: Prepared) -> tuple[Prepared, Callable[[Embedded], Embedded]]:
    positions = torch.arange(prepared.length).expand(3, -1)
    return replace(prepared, positions=positions, next_position=prepared.length), lambda embedded: embedded


def decode_without_offset(model: Qwen3VL, prepared: Prepared) -> tuple[Prepared, Callable[[Embedded], Embedded]]:
    return replace(prepared, next_position=prepared.length), lambda embedded: embedded


def no_deepstack(model: Qwen3VL, prepared: Prepared) -> tuple[Prepared, Callable[[Embedded], Embedded]]:
    return prepared, lambda embedded: replace(embedded, after_layer={})


def deepstack_in_reverse(model: Qwen3VL, prepared: Prepared) -> tuple[Prepared, Callable[[Embedded], Embedded]]:
    def reverse(embedded: Embedded) -> Embedded:
        after = dict(zip(embedded.after_layer, reversed(embedded.after_layer.values()), strict=True))
        return replace(embedded, after_layer=after)

    return prepared, reverse


@pytest.mark.parametrize("mutation", [text_positions, decode_without_offset, no_deepstack, deepstack_in_reverse])
def test_wrong_inputs_are_noticed(
    model: Qwen3VL,
    references: dict[str, StockQwen3VL],
    ask: Callable[..., Request],
    mutation: Callable[[Qwen3VL, Prepared], tuple[Prepared, Callable[[Embedded], Embedded]]],
) -> None:
    prepared = model.prepare(ask((200, 150), "Read all the text in the image."))
    theirs = references["tiny"].greedy(prepared, STEPS, logits=True)
    changed, alter = mutation(model, prepared)
    with pytest.raises(AssertionError, match="tokens differ"):
        assert_same(greedy(model, changed, STEPS, alter=alter), theirs)


def section_layout(model: Qwen3VL, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(model.network.decoder, "_axes", contiguous_axes((6, 5, 5)))


def rotation(model: Qwen3VL, patch: pytest.MonkeyPatch) -> None:
    decoder = model.network.decoder
    patch.setattr(decoder, "_table", pairwise_table)
    for layer in decoder.layers:
        patch.setattr(layer.attention, "rotation", rotate_pairwise)
    patch.setattr(decoder, "_scalar", None)
    decoder.set_rotary(decoder._frequencies, 512, torch.float32)


def gate_and_up_swapped(model: Qwen3VL, patch: pytest.MonkeyPatch) -> None:
    def swapped(mlp: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        gate, up = mlp.gate_up_proj(x).chunk(2, dim=-1)
        return mlp.down_proj(torch.nn.functional.silu(up) * gate)

    for layer in model.network.decoder.layers:
        patch.setattr(layer.mlp, "forward", partial(swapped, layer.mlp))


def query_and_key_norms_swapped(model: Qwen3VL, patch: pytest.MonkeyPatch) -> None:
    for layer in model.network.decoder.layers:
        attention = layer.attention
        query, key = attention.q_norm.forward, attention.k_norm.forward
        patch.setattr(attention.q_norm, "forward", key)
        patch.setattr(attention.k_norm, "forward", query)


@pytest.mark.parametrize("mutation", [section_layout, rotation, gate_and_up_swapped, query_and_key_norms_swapped])
def test_wrong_arithmetic_is_noticed(
    model: Qwen3VL,
    references: dict[str, StockQwen3VL],
    ask: Callable[..., Request],
    mutation: Callable[[Qwen3VL, pytest.MonkeyPatch], None],
) -> None:
    prepared = model.prepare(ask((200, 150), "Read all the text in the image."))
    theirs = references["tiny"].greedy(prepared, STEPS, logits=True)
    with pytest.MonkeyPatch.context() as patch:
        mutation(model, patch)
        with pytest.raises(AssertionError, match="tokens differ"):
            assert_same(greedy(model, prepared, STEPS), theirs)
    assert_same(greedy(model, prepared, STEPS), theirs)


def test_a_reference_changes_no_later_model_of_the_process(references: dict[str, StockQwen3VL]) -> None:
    from transformers import AutoModelForImageTextToText

    with torch.device("meta"):
        fresh = AutoModelForImageTextToText.from_config(references["tiny"]._model.config)
    assert "model.visual.patch_embed.proj.weight" in fresh.state_dict()
