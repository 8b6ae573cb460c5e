"""Items that need the engine: rows that share steps, buckets, compilation, end tokens, drafts, memory."""

from __future__ import annotations

import gc
import itertools
import json
import queue
from collections.abc import Sequence
from dataclasses import replace

import torch

from kaminari_core.bench import prompt_of
from kaminari_core.check.arithmetic import continued
from kaminari_core.check.compared import same_replies
from kaminari_core.check.outcome import Outcome, failed, judged, not_applicable
from kaminari_core.check.subject import Subject
from kaminari_core.decode import SHORTEST_BUCKET
from kaminari_core.engine import Engine
from kaminari_core.errors import UsageError
from kaminari_core.flow import Event, Failed, Finished, Request, Result, Sampling
from kaminari_core.layer_call import run_layer
from kaminari_core.parity import greedy
from kaminari_core.protocols import Model, Step

GREEDY = Sampling(logprobs=2)
"""Two log-probabilities a token, so that a tie can be told from an error."""


def asked(request: Request, tokens: int) -> Request:
    """The same conversation as a fresh request for so many tokens, end tokens ignored."""
    return Request(request.messages, max_tokens=tokens, ignore_end=True, sampling=GREEDY)


def serve(engine: Engine, requests: Sequence[Request]) -> list[Result]:
    """Submit requests together and wait for all their results, in their order. Raises the error of one that failed."""
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    for request in requests:
        engine.submit(request, events.put)
    results: dict[str, Result] = {}
    while len(results) < len(requests):
        event = events.get()
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Finished):
            results[event.request_id] = event.result
    return [results[request.id] for request in requests]


def slots(subject: Subject) -> Outcome:
    """Requests that share steps, more of them than slots, ending at different times, reply as they do alone.

    A row that ends is replaced by the last one, so its cache is moved: compaction.
    """
    steps, count = subject.settings.steps, subject.config.slots
    lengths = [steps // 2, steps, steps // 3 + 1, steps, steps // 2 + 1]
    names = [list(subject.requests)[index % len(subject.requests)] for index in range(len(lengths))]
    requests = [asked(subject.requests[name], length) for name, length in zip(names, lengths, strict=True)]
    with subject.engine() as engine:
        alone = [serve(engine, [request])[0] for request in requests]
    with subject.engine(together=len(requests)) as engine:
        together = serve(engine, requests)
    found = same_replies(names, together, alone, subject.settings.tolerance)
    shared = max(result.batch_size for result in together)
    suspect = (
        "rows influence each other: left padding, a mask that does not end at each row's own cursor, shared positions"
    )
    detail = f"{found.tokens} tokens of {len(requests)} requests in {count} slots, up to {shared} rows in a step"
    if shared < count:
        return failed(f"{detail}: the rows never shared a step")
    return judged(found.wrong is None, _with(detail, found.wrong), [suspect], tokens=found.tokens, rows=shared)


def buckets(subject: Subject) -> Outcome:
    """A reply that grows out of one length bucket into the next is what recomputing its text as a prompt says."""
    if subject.config.max_length <= SHORTEST_BUCKET:
        return not_applicable(f"the longest sequence, {subject.config.max_length}, is one bucket")
    steps = subject.settings.steps
    with subject.engine(together=2) as engine:
        crossing = asked(_crossing(subject, engine), steps)
        reply = serve(engine, [crossing, asked(subject.requests["text"], steps)])[0]
    prepared = subject.model.prepare(crossing)
    said = tuple(token.id for token in reply.tokens)
    inside = SHORTEST_BUCKET - prepared.length
    worst, places = 0.0, sorted({1, inside - 1, inside, inside + 1, inside + 2, steps - 1})
    for count in places:
        again = greedy(subject.model, continued(prepared, said[:count]), 1).logits
        assert again is not None, "greedy keeps logits"
        likely = reply.tokens[count].top[0]
        expected = torch.log_softmax(again[0], dim=-1)[likely.token]
        worst = max(worst, float((expected - likely.logprob).abs().nan_to_num(nan=torch.inf)))
    return judged(
        worst <= subject.settings.tolerance,
        f"max difference {worst:.2g} of log-probabilities at {len(places)} places around {SHORTEST_BUCKET} cache positions",
        ["a mask, a cursor or a position table that is right below one bucket only"],
        max_difference=worst,
        places=len(places),
    )


def compiled(subject: Subject) -> Outcome:
    """The compiled step says what the eager one says, with no graph break and one compile per bucket that was used."""
    if not subject.settings.compile:
        return not_applicable("left out on request (--no-compile)")
    steps = subject.settings.steps
    with subject.engine(slots=2) as engine:
        long = _crossing(subject, engine) if subject.config.max_length > SHORTEST_BUCKET else subject.requests["text"]
        single = asked(long, steps)
        pair = [asked(request, steps) for request in list(subject.requests.values())[:2]]
        eager = [*serve(engine, [single]), *serve(engine, pair[:1]), *serve(engine, pair[1:])]
    used = 3 if subject.config.max_length > SHORTEST_BUCKET else 2
    with subject.engine(slots=2, compile=True) as engine:
        same = serve(engine, [single])
    with subject.engine(slots=2, compile=True, together=2) as engine:
        same += serve(engine, pair)
        first = engine.stats().compiles
        same_again = [*serve(engine, [single]), *serve(engine, pair)]
        compiles = engine.stats().compiles
    names = ["alone", *list(subject.requests)[:2]]
    found = same_replies(names, same, eager, subject.settings.tolerance)
    again = same_replies(names, same_again, eager, subject.settings.tolerance)
    wrong = found.wrong or again.wrong
    detail = f"{compiles} graphs for {used} buckets, {found.tokens + again.tokens} tokens as without compiling"
    if compiles == 0:
        return failed("decode calls no layer through layer_call, so nothing is compiled")
    suspects = ["a shape, a stride or a Python value that changes from step to step" if compiles != used else
                "a buffer that the compiled step keeps, or arithmetic on the host that it does not repeat"]  # fmt: skip
    holds = wrong is None and compiles == used and first >= 1
    return judged(holds, _with(detail, wrong), suspects, graphs=compiles, buckets=used)


def end_tokens(subject: Subject) -> Outcome:
    """Every end token that the checkpoint names ends a reply, and none is part of it."""
    named = _named_end_tokens(subject)
    own = subject.model.shape.end_tokens
    missing = sorted(named - set(own))
    if missing:
        suspect = "only the tokenizer's own end token is honoured: replies run on until the token limit"
        return failed(
            f"the checkpoint ends replies with {sorted(named)}, the model's shape has {sorted(own)}", [suspect]
        )
    if not own:
        return failed("no token ends a reply", ["end_tokens of ModelShape is empty: every reply runs to its limit"])
    text = subject.requests["text"]
    with subject.engine() as engine:
        for token in own:
            sampling = Sampling(logit_bias={token: 100.0})
            (result,) = serve(engine, [Request(text.messages, max_tokens=4, sampling=sampling)])
            if result.finish_detail != "end_token" or result.tokens:
                return failed(f"end token {token} gave finish_detail {result.finish_detail!r}")
    return judged(True, f"{len(own)} end tokens end a reply: {', '.join(map(str, own))}", tokens=len(own))


def speculation(subject: Subject) -> Outcome:
    """Verifying several tokens in one step gives the logits of single steps, and drafted replies are the plain ones."""
    steps, config = subject.settings.steps, subject.config
    width = config.draft_tokens + 1
    apart = _width_difference(subject, width)
    requests = [asked(request, steps) for request in subject.requests.values()]
    drafts = ["prompt-lookup"]
    models: dict[str, Model] = {}
    if (drafting := _drafting_model(subject)) is not None:
        drafts.append("mtp")
        models["mtp"] = drafting
    with subject.engine() as engine:
        plain = serve(engine, requests)
    lines: list[str] = []
    wrong: str | None = None
    tokens = 0
    for draft in drafts:
        with subject.engine(model=models.get(draft), draft=draft, together=len(requests)) as engine:
            found = same_replies(list(subject.requests), serve(engine, requests), plain, subject.settings.tolerance)
            stats = engine.stats()
        tokens += found.tokens
        if found.wrong is not None:
            wrong = f"{draft}: {found.wrong}"
        lines.append(f"{draft} {stats.drafts_accepted} of {stats.drafts_proposed} accepted")
    detail = f"{tokens} tokens as without drafts ({', '.join(lines)}), {width} tokens in a step within {apart:.2g}"
    suspect = (
        "decode is right for one token per row only: each of a step's tokens has its own position, cursor and mask row"
    )
    holds = wrong is None and apart <= subject.settings.tolerance
    return judged(holds, _with(detail, wrong), [suspect], tokens=tokens, max_difference=apart)


def memory(subject: Subject) -> Outcome:
    """The cache takes what `ModelShape` says, and serving the same requests again leaves nothing behind."""
    model, config = subject.model, subject.config
    shape = model.shape
    cache = subject.cache(model, config)
    layers = shape.layers + shape.draft_layers
    position = 2 * layers * shape.kv_heads * shape.head_dim * model.dtype.itemsize
    planned = position * config.slots * (config.max_length + 1)
    taken = cache.keys.nbytes + cache.values.nbytes
    del cache
    if taken != planned:
        return failed(
            f"the cache takes {taken} bytes, planned are {planned}", ["sizes of ModelShape that are not the model's"]
        )
    requests = list(subject.requests.values())
    after: list[int] = []
    for _ in range(4):
        # Closing the engine ends its thread, which may still hold the last request for a moment.
        with subject.engine() as engine:
            for request in requests:
                serve(engine, [asked(request, 4)])
        after.append(_live_bytes(model))
    # What leaks, leaks each time; what somebody else in this process frees, goes once.
    growth = sorted(late - early for early, late in itertools.pairwise(after))[1]
    suspects = ["the model or its processor keeps something of every request"]
    return judged(
        growth <= 0,
        f"cache {taken} bytes, {position} per position and slot as planned; {growth} bytes more after another "
        f"{len(requests)} requests",
        suspects,
        cache_bytes=taken,
        growth_bytes=growth,
    )


def _crossing(subject: Subject, engine: Engine) -> Request:
    """A prompt that the reply carries over the end of the first length bucket."""
    return prompt_of(engine, SHORTEST_BUCKET - subject.settings.steps // 2)


def _width_difference(subject: Subject, width: int) -> float:
    """Between the logits of `width` single steps and of one step of that width, behind the same prompt."""
    model, prepared = subject.model, next(iter(subject.prepared.values()))
    config = replace(subject.config, slots=1)
    base = prepared.length

    def step(tokens: Sequence[int], at: int) -> Step:
        cursors = torch.arange(at, at + len(tokens), device=model.device)[None]
        positions = cursors + (prepared.next_position - base)
        return Step(torch.tensor([tokens], device=model.device), positions, cursors, config.max_length)

    with torch.inference_mode():
        single, joined = subject.cache(model, config), subject.cache(model, config)
        for cache in (single, joined):
            logits = model.prefill(model.embed(prepared), 0, base, cache, cache.claim())
        tokens, rows = [int(logits.argmax())], []
        for done in range(width):
            rows.append(model.decode(step(tokens[-1:], base + done), single, run_layer)[0, 0])
            tokens.append(int(rows[-1].argmax()))
        together = model.decode(step(tokens[:width], base), joined, run_layer)[0]
    return float((torch.stack(rows) - together).abs().max().nan_to_num(nan=torch.inf))


def _drafting_model(subject: Subject) -> Model | None:
    """The model with its draft head, None where there is none."""
    try:
        model = subject.load(subject.checkpoint, draft="mtp")
    except UsageError:
        return None
    return model if model.shape.draft_layers else None


def _named_end_tokens(subject: Subject) -> set[int]:
    """What generation_config.json says, else config.json."""
    for name in ("generation_config.json", "config.json"):
        path = subject.checkpoint / name
        if not path.is_file():
            continue
        values = json.loads(path.read_text(encoding="utf-8"))
        for place in (values, values.get("text_config")):
            found = place.get("eos_token_id") if isinstance(place, dict) else None
            if found is not None:
                return set(found) if isinstance(found, list) else {found}
    return set()


def _live_bytes(model: Model) -> int:
    """Bytes of all tensors that are alive: on the device by its allocator, on a CPU by what the collector can see."""
    gc.collect()
    if model.device.type == "cuda":
        return torch.cuda.memory_allocated(model.device)
    # By type: asking an object for its class may wake a lazy one of another library.
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def _with(detail: str, wrong: str | None) -> str:
    return detail if wrong is None else f"{detail}; {wrong}"
