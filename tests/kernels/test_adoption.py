"""Models that have taken the kernels: the same replies, one graph per number of rows, and rows that do not see each other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile

from kaminari_core.cache import StaticCache
from kaminari_core.config import EngineConfig
from kaminari_core.decode import Bucket, DecodeCore
from kaminari_core.flow import Embedded
from kaminari_core.kernels.adoption import FewRowsLinear, adopt
from kaminari_core.layers import attends_by_cursors
from kaminari_core.quantization.layouts import OwnLayout
from kaminari_core.quantization.linear import QuantizedLinear
from kaminari_core.quantization.scheme import Scheme, quantize
from kaminari_core.testing import TinyModel

LENGTH = 512
CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("kernels")


class Whole(TinyModel):
    """The small decoder, with what it computes with under the name that the core looks for."""

    @property
    def network(self) -> nn.Module:
        return self.decoder


def quantized(bits: int = 4, dtype: torch.dtype = torch.float32) -> Whole:
    """A model whose layers and head are codes."""
    model = plain(dtype)
    for module in list(model.decoder.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                scheme = Scheme(bits, 32)
                layer = QuantizedLinear(child.in_features, child.out_features, scheme)
                layer.place(0, quantize(child.weight, scheme), CPU, dtype)
                setattr(module, name, layer)
    return model


def plain(dtype: torch.dtype = torch.float32) -> Whole:
    model = Whole(EngineConfig(max_length=LENGTH))
    model.decoder.to(dtype)
    model.dtype = dtype
    model.decoder.set_rotary(model.decoder._frequencies, LENGTH, dtype)  # type: ignore[arg-type]
    return model


def core_of(model: TinyModel, slots: int = 2, *, compile: bool = False, widths: tuple[int, ...] = (1,)) -> DecodeCore:
    cache = StaticCache(model.shape, slots, LENGTH, model.device, model.dtype, width=max(widths))
    return DecodeCore(model, cache, compile=compile, widths=widths)


def prompts(core: DecodeCore, lengths: tuple[int, ...]) -> list[int]:
    """Fill one slot after the other with tokens of a fixed generator; the token that follows each."""
    generator = torch.Generator().manual_seed(5)
    model, following = core.model, []
    assert isinstance(model, TinyModel)
    with torch.inference_mode():
        for slot, length in enumerate(lengths):
            ids = torch.randint(0, 256, (length,), generator=generator)
            embedded = Embedded(model.decoder.embed_tokens(ids), torch.arange(length)[None])
            following.append(int(model.prefill(embedded, 0, length, core.cache, slot).argmax()))
    return following


def decoded(core: DecodeCore, lengths: tuple[int, ...], steps: int) -> tuple[list[list[int]], Tensor]:
    """Tokens (steps, rows) and logits (steps, rows, vocabulary) of greedy decoding behind some prompts."""
    last, tokens, logits = prompts(core, lengths), [], []
    for done in range(steps):
        at = [[length + done] for length in lengths]
        logits.append(core.step([[token] for token in last], at, at)[:, 0].float().clone())
        last = logits[-1].argmax(-1).tolist()
        tokens.append(last)
    return tokens, torch.stack(logits)


def test_replies_are_those_of_torch() -> None:
    model, adopted = plain(), plain()
    adopt(adopted, 8)
    assert not attends_by_cursors(model)
    assert attends_by_cursors(adopted)
    theirs, ours = (decoded(core_of(each, 4), (3, 250, 31, 17), 12) for each in (model, adopted))
    assert ours[0] == theirs[0]
    torch.testing.assert_close(ours[1], theirs[1], atol=2e-4, rtol=1e-4)


def test_in_bfloat16_few_rows_go_through_the_kernel_and_ties_stay() -> None:
    model, adopted = plain(torch.bfloat16), plain(torch.bfloat16)
    adopted.decoder.lm_head.weight = adopted.decoder.embed_tokens.weight
    model.decoder.lm_head.weight = model.decoder.embed_tokens.weight
    adopt(adopted, 8)
    assert isinstance(adopted.decoder.lm_head, FewRowsLinear)
    assert adopted.decoder.lm_head.weight is adopted.decoder.embed_tokens.weight
    assert {type(module) for module in adopted.decoder.modules() if isinstance(module, nn.Linear)} == {FewRowsLinear}
    theirs, ours = (decoded(core_of(each), (40, 9), 1)[1] for each in (model, adopted))
    # Two roundings of every sum to 8 bits.
    assert (ours - theirs).norm() / theirs.norm() < 0.05


@pytest.mark.parametrize("make", [plain, quantized], ids=["full", "quantized"])
def test_one_graph_for_all_layers_and_lengths_and_none_broken(make: Callable[[], Whole]) -> None:
    model = make()
    adopt(model, 8)
    counters.clear()
    compiled = core_of(model, compile=True)
    assert compiled.buckets == [Bucket(1, 0), Bucket(2, 0)]
    compiled.warm_up(lambda *_: None)
    for lengths in ((3,), (250, 30)):
        # The longer row of the last case crosses what would be the end of the first length bucket.
        assert decoded(compiled, lengths, 12)[0] == decoded(core_of(model), lengths, 12)[0]
    assert compiled.compiles == counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]


def test_a_step_calls_each_kernel_once_per_layer_and_nothing_of_torchs_products() -> None:
    model = quantized()
    adopt(model, 8)
    core = core_of(model, compile=True)
    core.warm_up(lambda *_: None)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        core.step([[1]], [[5]], [[5]])
    calls = {event.key: event.count for event in recorded.key_averages()}
    assert calls["kaminari::linear_codes"] == 4 * 2 + 1
    assert calls["kaminari::decode_attention"] == 2
    assert not {"aten::mm", "aten::addmm", "aten::linear", "aten::scaled_dot_product_attention"} & set(calls)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("activation_bits", [8, 16])
def test_a_row_among_others_has_the_bits_it_has_alone(bits: int, activation_bits: int) -> None:
    model = quantized(bits, torch.bfloat16)
    adopt(model, activation_bits)
    assert {layout.activation_bits for layout in model.decoder.modules() if isinstance(layout, OwnLayout)} == {
        activation_bits
    }
    together = decoded(core_of(model, 3), (17, 40, 5), 6)[1]
    alone = core_of(model, 3)
    torch.testing.assert_close(decoded(alone, (17,), 6)[1][:, 0], together[:, 0], atol=0, rtol=0)


def test_quantized_prompts_may_be_cut_anywhere() -> None:
    """Prefill by the kernels: a token's hidden state does not depend on how many others are in the same chunk."""
    model = quantized()
    adopt(model, 8)
    layer = model.decoder.layers[0].mlp
    x = torch.randn(100, 64)
    torch.testing.assert_close(torch.cat([layer(x[:1]), layer(x[1:13]), layer(x[13:])]), layer(x), atol=0, rtol=0)


def test_the_head_runs_for_the_last_chunk_of_a_prompt_only() -> None:
    model, seen = plain(), []
    model.decoder.lm_head.register_forward_hook(lambda *arguments: seen.append(arguments[1][0].shape))
    cache = StaticCache(model.shape, 1, LENGTH, CPU, torch.float32)
    ids = torch.arange(50) % 256
    embedded = Embedded(model.decoder.embed_tokens(ids), torch.arange(50)[None])
    sizes = [model.prefill(embedded, start, min(start + 20, 50), cache, 0).numel() for start in range(0, 50, 20)]
    assert sizes == [0, 0, model.shape.vocabulary]
    assert seen == [(1, 64)]


def test_drafted_tokens_are_verified_by_the_same_numbers() -> None:
    """A step of width 3 against three single steps, bit for bit, with an idle position in one row."""
    model = quantized(4, torch.bfloat16)
    adopt(model, 8)
    single, wide = core_of(model), core_of(model, widths=(1, 3))
    prompts(single, (9, 20)), prompts(wide, (9, 20))
    fed = [[7, 8, 9], [10, 11, 12]]
    expected = []
    for token in range(3):
        at = [[9 + token], [20 + token]]
        expected.append(single.step([[row[token]] for row in fed], at, at)[:, 0].clone())
    cursors = [[9, 10, 11], [20, 21, LENGTH]]
    got = wide.step(fed, [[9, 10, 11], [20, 21, 0]], cursors)
    torch.testing.assert_close(got[0], torch.stack(expected, 1)[0], atol=0, rtol=0)
    torch.testing.assert_close(got[1, :2], torch.stack(expected, 1)[1, :2], atol=0, rtol=0)
    assert torch.isfinite(got).all()
