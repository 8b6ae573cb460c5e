"""The plan: how many bytes a model takes while it serves, part by part, under one configuration.

Parts are alive together or in turn. Weights, cache and tables stay; the vision tower, a chunk of prefill and a decode step
never run at the same time, so the largest of them counts. Formulas follow the code that allocates: `cache.StaticCache`,
`layers.Decoder`, `decode.DecodeCore`, and the package's own numbers for its vision tower. `benchmarks/memory_plan.py` holds them
to measured peaks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kaminari_core.config import EngineConfig
from kaminari_core.fit.facts import Footprint
from kaminari_core.fit.weights import Weights

MIB = 2**20
ITEM = {"float32": 4, "bfloat16": 2, "float16": 2}
LOADING = 288 * MIB
"""On a CPU, mapped pages of weight files and the run that is being copied, on top of the weights (see `weights`)."""
PAGE_SCAN = 2480 * 3508 * 3 * 2
"""An A4 page at 300 dpi while it is decoded: its pixels, and once more while it is turned, flattened or resized."""
SHORTEST_BUCKET = 256
RUNTIME_CPU = 420 * MIB
"""The interpreter with torch and the model library, before weights. Measured, see docs/fit.md."""
COMPILER_CPU = 90 * MIB
"""torch.compile in this process once it has compiled; the processes that it starts for a moment are not counted. Measured, see
docs/fit.md."""
CONTEXT_CUDA = 320 * MIB
"""What a CUDA context and torch's kernels take of a card, outside of torch's allocator. A usual figure, not measured here."""
WORKSPACE_CUDA = 20 * MIB
"""Work space of the matrix library on the two streams that are used. Not measured here."""
GRAPH_CUDA = 3 * MIB
"""A captured step, outside of torch's allocator. Not measured here."""
FRAGMENTS = 0.05
"""On a card, the part of what comes and goes that the allocator loses to rounding and gaps. Not measured here."""


Group = Literal["weights", "cache", "work", "reserve", "process"]


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a plan. `phase` is `always`, or the one of `vision`, `prefill`, `decode` and `loading` in which it is alive.

    Weights, cache and work are tensors. `reserve` is what serving takes besides, `process` what the process has taken before a
    model is loaded.
    """

    group: Group
    name: str
    bytes: int
    phase: str = "always"
    note: str = ""


@dataclass(frozen=True, slots=True)
class Case:
    """What is planned for: a checkpoint's sizes and weights, on a kind of device (`cuda`, `cpu`), in a dtype, by its name."""

    footprint: Footprint
    weights: Weights
    device: str
    dtype: str
    folder: Path

    @property
    def item(self) -> int:
        """Bytes of an element."""
        return ITEM[self.dtype]


@dataclass(frozen=True, slots=True)
class Plan:
    """The parts under one configuration, all in bytes."""

    case: Case
    config: EngineConfig
    parts: tuple[Part, ...]

    @property
    def phases(self) -> dict[str, int]:
        """What each phase takes by itself."""
        found: dict[str, int] = {}
        for part in self.parts:
            if part.phase != "always":
                found[part.phase] = found.get(part.phase, 0) + part.bytes
        return found

    @property
    def allocated(self) -> int:
        """The peak of the tensors: what torch's allocator reports on a card."""
        held = sum(part.bytes for part in self.parts if part.phase == "always") - self.group("reserve", "process")
        phases = self.phases
        serving = held + max(phases.get(name, 0) for name in ("vision", "prefill", "decode"))
        # The cache and the tables are allocated when the weights are there.
        return max(serving, self.case.weights.total + phases.get("loading", 0))

    @property
    def total(self) -> int:
        """The peak, everything counted."""
        return self.allocated + self.group("reserve", "process")

    def group(self, *groups: Group) -> int:
        """What the parts of some groups take together, whenever they are alive."""
        return sum(part.bytes for part in self.parts if part.group in groups)

    @property
    def token_bytes(self) -> int:
        """Cache bytes of one position of one slot."""
        return cache_bytes_per_token(self.case.footprint, self.case.item, draft=self.config.draft == "mtp")


def make_plan(case: Case, config: EngineConfig) -> Plan:
    """Plan one configuration. `visual_tokens` is the largest picture; a text-only model has none."""
    parts = (*_weights(case), *_held(case, config), *_in_turn(case, config), *_besides(case, config))
    return Plan(case, config, parts)


def cache_bytes_per_token(footprint: Footprint, item: int, *, draft: bool) -> int:
    """Keys and values of one position of one slot."""
    layers = footprint.layers + (footprint.draft_layers if draft else 0)
    return 2 * layers * footprint.kv_heads * footprint.head_dim * item


def _weights(case: Case) -> Iterator[Part]:
    kinds = case.weights.kinds
    converted = f"{case.weights.converted} quantized" if case.weights.converted else ""
    yield Part("weights", "vision tower", kinds["vision"])
    yield Part("weights", "embeddings", kinds["embedding"])
    yield Part("weights", "decoder", kinds["linear"] + kinds["other"], note=converted)
    yield Part("weights", "head", kinds["head"], note="" if kinds["head"] else "shares the embeddings")
    if case.weights.draft:
        yield Part("weights", "draft head", case.weights.draft)


def _held(case: Case, config: EngineConfig) -> Iterator[Part]:
    """What is allocated once and stays."""
    facts, draft = case.footprint, config.draft == "mtp"
    token = cache_bytes_per_token(facts, case.item, draft=draft)
    positions = _length(case, config)
    note = f"{config.slots} x {positions} tokens of {token / 1024:.0f} KiB"
    yield Part("cache", "keys and values", token * config.slots * (positions + 1), note=note)
    if draft:
        yield Part("cache", "draft states", config.slots * (config.draft_tokens + 1) * facts.hidden * case.item)
    yield Part("work", "rotary tables", 2 * positions * facts.head_dim * case.item)
    if case.device == "cpu" and facts.picture is not None:
        patch = facts.picture.patches * facts.picture.patch_values * 4
        waiting = (config.slots + config.prepare_threads) * _page(case, config) * patch
        yield Part("work", "pictures prepared", waiting + config.prepare_threads * PAGE_SCAN)


def _in_turn(case: Case, config: EngineConfig) -> Iterator[Part]:
    """What comes and goes: never two of these phases at once."""
    facts, item = case.footprint, case.item
    rows = 1 if facts.picture is None else facts.picture.rows
    row = facts.hidden * item
    length = _length(case, config)
    following = row if config.draft == "mtp" else 0
    embedded = length * (rows * row + following + 3 * 8)
    if facts.picture is not None:
        patches = _page(case, config) * facts.picture.patches
        # On a card, the picture's own values lie there as well, in float32.
        values = 4 * facts.picture.patch_values if case.device == "cuda" else 0
        tower = patches * (facts.picture.tower[item] + values)
        # The embeddings, and the features of the pictures seen so far, which are all of a prompt at most.
        yield Part("work", "prompt before the decoder", length * (row + rows * row), "vision")
        yield Part("work", "vision tower", tower, "vision", note=f"one picture of {_page(case, config)} tokens")
    for phase in ("prefill", "decode"):
        yield Part("work", "longest prompt, embedded", embedded, phase)
    chunk = min(config.prefill_chunk, length)
    yield Part("work", "prefill", _chunk(case, config, chunk), "prefill", note=f"chunks of {chunk} tokens")
    yield Part("work", "decode step", _step(case, config), "decode", note="with logits")
    if case.device == "cpu":
        yield Part("work", "files while they are read", min(LOADING, case.weights.stored), "loading")


def _chunk(case: Case, config: EngineConfig, chunk: int) -> int:
    """A chunk of prefill at the worst of its layer, with the logits behind it."""
    facts, item = case.footprint, case.item
    # hidden before and behind attention, what it added, the norm's output; gate and up joined, the gate's activation, the product
    mlp = chunk * item * (4 * facts.hidden + 4 * facts.intermediate + 2 * facts.head_dim)
    queries, keys = facts.heads * facts.head_dim, facts.kv_heads * facts.head_dim
    attention = chunk * item * (3 * facts.hidden + 4 * queries + 4 * keys + 2 * facts.head_dim)
    length = _length(case, config)
    if length > chunk:
        # A later chunk sees what is stored through a mask.
        attention += chunk * length * (1 + item)
        if case.device == "cuda":
            # No fused kernel takes a mask and grouped heads together: scores in float32, before and behind the softmax.
            attention += 2 * 4 * facts.heads * chunk * length
    return max(mlp, attention) + case.weights.rebuilt + 2 * facts.vocabulary * item


def _step(case: Case, config: EngineConfig) -> int:
    """A decode step of all slots, and choosing tokens from its logits."""
    facts, item = case.footprint, case.item
    width = 1 if config.draft == "none" else config.draft_tokens + 1
    rows = config.slots * width
    layer = rows * item * (6 * facts.hidden + 4 * facts.intermediate + 4 * facts.heads * facts.head_dim)
    mask = rows * facts.heads * _length(case, config) * (1 + item)
    # Sampling works on one row at a time, in float32 with an index of eight bytes for the sort.
    sampling = facts.vocabulary * (6 * 4 + 8)
    logits = rows * facts.vocabulary * item
    if case.device == "cuda" and config.compile:
        # Every captured bucket keeps its own.
        shapes = sum(_doubling(1, config.slots)) * len(_doubling(SHORTEST_BUCKET, _length(case, config)))
        logits = shapes * width * facts.vocabulary * item
    return layer + mask + sampling + logits + case.weights.rebuilt


def _besides(case: Case, config: EngineConfig) -> Iterator[Part]:
    """What is no tensor."""
    if case.device == "cpu":
        yield Part("process", "interpreter and libraries", RUNTIME_CPU)
        if config.compile:
            yield Part("reserve", "compiler", COMPILER_CPU)
        return
    yield Part("process", "CUDA context", CONTEXT_CUDA + WORKSPACE_CUDA)
    buckets = len(_doubling(1, config.slots)) * len(_doubling(SHORTEST_BUCKET, _length(case, config)))
    if config.compile:
        widths = 1 if config.draft == "none" else 2
        yield Part("reserve", "captured steps", buckets * widths * GRAPH_CUDA, note=f"{buckets * widths} shapes")
    coming = sum(part.bytes for part in _in_turn(case, config) if part.phase in ("vision", "prefill"))
    yield Part("reserve", "gaps of the allocator", int(coming * FRAGMENTS))


def _length(case: Case, config: EngineConfig) -> int:
    """Cache positions of a slot: no more than the model's longest sequence."""
    return min(config.max_length, case.footprint.max_positions)


def _page(case: Case, config: EngineConfig) -> int:
    """Visual tokens of the largest picture that is planned for."""
    picture = case.footprint.picture
    assert picture is not None, "a text-only model has no page"
    tokens = config.visual_tokens if picture.most is None else min(config.visual_tokens, picture.most)
    return min(tokens, config.page_tokens) if config.page_tokens else tokens


def _doubling(first: int, last: int) -> tuple[int, ...]:
    """The bucket sizes of the decode core: first, twice that, ... below last, then last."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 2
    return (*sizes, last)
