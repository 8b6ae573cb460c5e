"""The draft head against its formula in plain torch, and in the engine: guesses come faster, replies stay the same.

A head with random weights is never right, so for the engine its last matrix is fitted, on what the formula gives, to say what the
model says. That it is right in the engine as well proves that the hidden states, next tokens, positions, keys and values it
gets there are those of the formula.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.modeling_layers import MtpLayer
from transformers.models.glm_ocr.modeling_glm_ocr import GlmOcrRMSNorm, GlmOcrTextDecoderLayer

from kaminari_core.cache import StaticCache
from kaminari_core.config import EngineConfig
from kaminari_core.engine import Engine
from kaminari_core.flow import Event, Failed, Finished, Prepared, Request, Result, Sampling
from kaminari_core.layer_call import run_layer
from kaminari_core.parity import greedy
from kaminari_core.protocols import Step
from kaminari_core.scheduler import ContinuousScheduler
from kaminari_glmocr.model import GlmOcr, load
from kaminari_glmocr.reference import StockGlmOcr
from tests.conftest import CONVERSATIONS

CPU = torch.device("cpu")
LAYER = "model.language_model.layers.2."
HEADS, KV_HEADS, HEAD_DIM, SECTIONS, THETA, EPS = 4, 2, 32, (4, 6, 6), 10_000.0, 1e-5
REPLY = 40


@dataclass(frozen=True)
class Observed:
    """A prompt and its reply in the reference class: S + 1 `tokens`, and of the first S of them the `hidden` states (S, H) behind
    the final norm and the `positions` (3, S). `pictures` marks the tokens from the second on that `features` stand for."""

    prompt: int
    tokens: tuple[int, ...]
    hidden: Tensor
    positions: Tensor
    pictures: Tensor
    features: Tensor


@torch.no_grad()
def observe(reference: StockGlmOcr, prepared: Prepared, reply: Sequence[int]) -> Observed:
    """Run a prompt and all of its reply but the last token through the class of transformers."""
    stock = reference._model.model
    tokens = (*prepared.tokens, *reply)
    behind = prepared.next_position + torch.arange(len(reply) - 1).expand(3, -1)
    positions = torch.cat((prepared.positions, behind), dim=1)
    inputs = {name: value for name, value in reference._inputs(prepared).items() if name.startswith(("pixel", "image"))}
    output = stock(input_ids=torch.tensor([tokens[:-1]]), position_ids=positions[:, None], **inputs)
    features = torch.zeros(0, output.last_hidden_state.shape[-1])
    if inputs:
        features = torch.cat(stock.get_image_features(**inputs).pooler_output)
    pictures = torch.tensor(tokens[1:]) == stock.config.image_token_id
    pictures[prepared.length - 1 :] = False  # a model with random weights writes the placeholder as well
    return Observed(prepared.length, tokens, output.last_hidden_state[0], positions, pictures, features)


class Formula:
    """The lines of docs/glmocr.md, with complex numbers and an explicit softmax, over the checkpoint's own tensors."""

    def __init__(self, checkpoint: Path, layer: str = LAYER) -> None:
        tensors = load_file(checkpoint / "model.safetensors")
        self.weights = {
            name.removeprefix(layer).removesuffix(".weight"): value.float()
            for name, value in tensors.items()
            if layer in name
        }

    def norm(self, name: str, x: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * self.weights[name]

    def embedded(self, observed: Observed) -> Tensor:
        """What stands at t + 1, for every t."""
        following = self.weights["embed_tokens"][torch.tensor(observed.tokens[1:])]
        following[observed.pictures] = observed.features
        return following

    def joined(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        return torch.cat((self.norm("enorm", embedded), self.norm("hnorm", hidden)), -1) @ self.weights["eh_proj"].T

    def turned(self, x: Tensor, positions: Tensor) -> Tensor:
        """x (S, heads, D): features 2j and 2j + 1 are one complex number, turned by the angle of frequency j."""
        axes = [axis for axis, size in enumerate(SECTIONS) for _ in range(size)]
        angles = positions[axes].T * THETA ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        numbers = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(numbers * torch.polar(torch.ones_like(angles), angles)[:, None]).flatten(-2)

    def states(self, u: Tensor, positions: Tensor) -> Tensor:
        """d (S, H) of the block's inputs u (S, H)."""
        normed = self.norm("input_layernorm", u)
        q, k, v = ((normed @ self.weights[f"self_attn.{n}_proj"].T).view(len(u), -1, HEAD_DIM) for n in "qkv")
        q, k = self.turned(q, positions), self.turned(k, positions)
        k, v = (each.repeat_interleave(HEADS // KV_HEADS, dim=1) for each in (k, v))
        scores = torch.einsum("shd,thd->hst", q, k) / HEAD_DIM**0.5
        scores = scores.masked_fill(torch.ones(len(u), len(u)).triu(1).bool(), float("-inf"))
        attended = torch.einsum("hst,thd->shd", scores.softmax(-1), v).flatten(1) @ self.weights["self_attn.o_proj"].T
        u = u + self.norm("post_self_attn_layernorm", attended)
        gate, up = (self.norm("post_attention_layernorm", u) @ self.weights["mlp.gate_up_proj"].T).chunk(2, -1)
        mixed = (gate * gate.sigmoid() * up) @ self.weights["mlp.down_proj"].T
        return self.norm("shared_head.norm", u + self.norm("post_mlp_layernorm", mixed))

    def logits(self, states: Tensor) -> Tensor:
        return states @ self.weights["shared_head.head"].T

    def chained(self, u: Tensor, states: Tensor, positions: Tensor, t: int, guess: int) -> Tensor:
        """d at t + 1, continued from d at t with a guess of the token at t + 2."""
        further = self.joined(self.weights["embed_tokens"][guess], states[t])
        return self.states(torch.cat((u[: t + 1], further[None])), positions[:, : t + 2])[-1]


@pytest.fixture(scope="module")
def formula(tiny_random: Path) -> Formula:
    return Formula(tiny_random)


@pytest.fixture(scope="module")
def observations(model: GlmOcr, reference: StockGlmOcr) -> dict[str, Observed]:
    """Each conversation with its greedy reply."""
    found = {}
    for name, messages in CONVERSATIONS.items():
        prepared = model.prepare(Request(messages))
        found[name] = observe(reference, prepared, greedy(model, prepared, REPLY).tokens)
    return found


@pytest.mark.parametrize("name", list(CONVERSATIONS))
@torch.no_grad()
def test_the_formula_is_that_of_transformers_generic_layer(
    reference: StockGlmOcr, formula: Formula, observations: dict[str, Observed], name: str
) -> None:
    text = reference._model.config.text_config
    layer = MtpLayer(text, GlmOcrTextDecoderLayer, GlmOcrRMSNorm, layer_idx=0)
    names = {"post_norm": "shared_head.norm"}
    layer.load_state_dict(
        {
            parameter: formula.weights[names.get(stem, stem)]
            for parameter in layer.state_dict()
            for stem in [parameter.removesuffix(".weight").removeprefix("mtp_block.")]
        }
    )
    observed = observations[name]
    embedded, hidden = formula.embedded(observed), observed.hidden
    tables = reference._model.model.language_model.rotary_emb(hidden[None], observed.positions[:, None])
    theirs = layer(embedded[None], hidden[None], tables, None, None, None)
    ours = formula.states(formula.joined(embedded, hidden), observed.positions)
    torch.testing.assert_close(ours, theirs[0], atol=1e-4, rtol=0)


def step_of(cursors: Sequence[int], tokens: Sequence[int], positions: Tensor, length: int) -> Step:
    places = torch.tensor([cursors])
    return Step(torch.tensor([tokens]), positions[0, cursors][None], places, length)


@pytest.mark.parametrize("name", list(CONVERSATIONS))
@pytest.mark.parametrize("chunk", [7, 1000])
@torch.inference_mode()
def test_guesses_equal_the_formula(
    drafting: GlmOcr, formula: Formula, observations: dict[str, Observed], name: str, chunk: int
) -> None:
    """Behind the prompt, behind a step of three tokens at each count of accepted ones, and chained from there."""
    observed = observations[name]
    tokens, positions, prompt = observed.tokens, observed.positions, observed.prompt
    u = formula.joined(formula.embedded(observed), observed.hidden)
    states = formula.states(u, positions)
    prepared = drafting.prepare(Request(CONVERSATIONS[name]))
    cache = StaticCache(drafting.shape, 1, prompt + 8, CPU, torch.float32, width=3)
    embedded, slot = drafting.embed(prepared), cache.claim()
    for start in range(0, prompt, chunk):
        drafting.prefill(embedded, start, min(start + chunk, prompt), cache, slot)

    def draft(cursors: list[int], end: int, fed: list[int]) -> Tensor:
        step = step_of(cursors, fed, positions, cache.max_length)
        return drafting.draft(step, torch.tensor([end]), cache, run_layer)[0]

    def same(ours: Tensor, theirs: Tensor) -> None:
        torch.testing.assert_close(ours, formula.logits(theirs), atol=1e-4, rtol=0)

    same(draft([prompt - 1], 0, [tokens[prompt]]), states[prompt - 1])
    cursors = [prompt, prompt + 1, prompt + 2]
    for end in range(3):
        # Each time anew: a chained guess leaves its own keys, values and state.
        drafting.decode(step_of(cursors, tokens[prompt : prompt + 3], positions, cache.max_length), cache, run_layer)
        logits = draft(cursors, end, [tokens[cursor + 1] for cursor in cursors])
        same(logits, states[cursors[end]])
        guess = int(logits.argmax())
        same(draft([cursors[end] + 1], 0, [guess]), formula.chained(u, states, positions, cursors[end], guess))


@pytest.fixture(scope="module")
def fitted(
    tiny_random: Path, formula: Formula, observations: dict[str, Observed], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The checkpoint with a draft head that knows the replies to the conversations, first guesses and second ones."""
    inputs: list[Tensor] = []
    targets: list[int] = []
    for observed in observations.values():
        u = formula.joined(formula.embedded(observed), observed.hidden)
        states = formula.states(u, observed.positions)
        for t in range(observed.prompt - 1, len(observed.tokens) - 2):
            inputs.append(states[t])
            targets.append(observed.tokens[t + 2])
            if t + 3 < len(observed.tokens):
                inputs.append(formula.chained(u, states, observed.positions, t, observed.tokens[t + 2]))
                targets.append(observed.tokens[t + 3])
    points, wanted = torch.stack(inputs), torch.tensor(targets)
    head = torch.zeros_like(formula.weights["shared_head.head"]).requires_grad_()
    fitting = torch.optim.LBFGS([head], max_iter=150, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        fitting.zero_grad()
        value = F.cross_entropy(points @ head.T, wanted)
        value.backward()
        return value

    fitting.step(loss)
    assert ((points @ head.T).argmax(-1) == wanted).float().mean() > 0.9, "the fit is too poor to prove anything"
    folder = tmp_path_factory.mktemp("fitted") / "glmocr"
    shutil.copytree(tiny_random, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[LAYER + "shared_head.head.weight"] = head.detach()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def engine_of(checkpoint: Path, config: EngineConfig) -> Engine:
    model = load(checkpoint, config, CPU, lambda *_: None)
    width = 1 if config.draft == "none" else config.draft_tokens + 1
    cache = StaticCache(model.shape, config.slots, config.max_length, CPU, model.dtype, width=width)
    return Engine("glmocr", model, cache, ContinuousScheduler(config), config)


def asks() -> list[Request]:
    """Every conversation greedily, and some rows that choose otherwise."""
    greedy_ones = [Request(messages, max_tokens=REPLY, ignore_end=True) for messages in CONVERSATIONS.values()]
    one, many = CONVERSATIONS["one image"], CONVERSATIONS["three images"]
    return [
        *greedy_ones,
        Request(one, max_tokens=30, sampling=Sampling(temperature=0.8, seed=3), ignore_end=True),
        Request(many, max_tokens=30, sampling=Sampling(repetition_penalty=1.2), ignore_end=True),
        Request(many, max_tokens=30),
        Request(one, max_tokens=1, ignore_end=True),
    ]


def together(engine: Engine, requests: Sequence[Request]) -> list[Result]:
    """The results of requests that are submitted at once."""
    ends: dict[str, Result] = {}
    done = threading.Event()

    def sink(event: Event) -> None:
        assert not isinstance(event, Failed), event.error
        if isinstance(event, Finished):
            ends[event.request_id] = event.result
            if len(ends) == len(requests):
                done.set()

    for request in requests:
        engine.submit(request, sink)
    assert done.wait(60)
    return [ends[request.id] for request in requests]


def said(results: Sequence[Result]) -> list[tuple[list[int], str, str]]:
    return [([token.id for token in each.tokens], each.text, each.finish_detail) for each in results]


@pytest.fixture(scope="module")
def plain(fitted: Path, config: EngineConfig) -> list[tuple[list[int], str, str]]:
    """What the requests get without drafting."""
    with engine_of(fitted, config) as engine:
        return said([engine.generate(ask) for ask in asks()])


@pytest.mark.parametrize("count", [1, 3])
def test_replies_are_the_same_and_guesses_are_right(
    fitted: Path, config: EngineConfig, plain: list[tuple[list[int], str, str]], count: int
) -> None:
    drafted = replace(config, draft="mtp", draft_tokens=count, draft_auto=False, prefill_chunk=16, slots=4)
    with engine_of(fitted, drafted) as engine:
        alone = [engine.generate(ask) for ask in asks()]
        at_once = together(engine, asks())
        assert engine.stats().slots_busy == 0
    assert said(alone) == plain
    assert said(at_once) == plain
    for results in (alone, at_once):
        for result in results[: len(CONVERSATIONS)]:
            # Every first guess and, of three, every second one was fitted; each is one token that needs no step.
            assert result.drafts.accepted > 0.9 * result.drafts.proposed / (1 if count == 1 else 3 / 2)
            assert result.drafts.accepted > REPLY // 2 - 3
    assert max(result.batch_size for result in at_once) > 1


@pytest.mark.parametrize("slots", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_compiled_drafting_compiles_once_per_bucket(
    fitted: Path, config: EngineConfig, plain: list[tuple[list[int], str, str]], slots: int
) -> None:
    drafted = replace(config, draft="mtp", draft_tokens=2, draft_auto=False, slots=slots, max_length=192, compile=True)
    with engine_of(fitted, drafted) as engine:
        assert said(together(engine, asks()[:5])) == plain[:5]
        assert said([engine.generate(ask) for ask in asks()[:2]]) == plain[:2]
        # Each number of rows with one token and with three; decoder and draft head share them.
        assert engine.stats().compiles == 2 * slots
