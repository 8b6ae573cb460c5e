"""Greedy reading with a key-value cache, and character error rates on held-out pictures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from rapidfuzz.distance import Levenshtein
from torch import Tensor

from make_pages import Picture, Words, draw_line, draw_receipt, draw_style, sample_receipt
from training import prompt
from training.batches import turn_positions
from training.canvas import place
from training.forward import Reader, add_tokens, cut_patches, place_tokens

KINDS = ("line", "scramble", "few", "receipt")


def held_out(kind: str, count: int, seed: int = 77) -> list[Picture]:
    """Draw pictures of words that were never trained on."""
    random = np.random.default_rng([seed, KINDS.index(kind)])
    words = Words(random, held_out=True)
    pictures = []
    for _ in range(count):
        style = draw_style(random)
        if kind in ("line", "scramble"):
            pictures.append(draw_line(words.line() if kind == "line" else words.scramble(), style, random))
            continue
        lines = int(random.integers(2, 5) if kind == "few" else random.integers(6, 15))
        pitch = max(float(random.uniform(22, 34)), 1.15 * style.size)
        width = int(random.integers(160, 289) if kind == "few" else random.integers(220, 257))
        pictures.append(draw_receipt(words, style, random, lines, width, min(pitch, 480 / lines)))
    return pictures


def error_rate(truths: Sequence[str], answers: Sequence[str]) -> float:
    """Give the character error rate: edits over characters of the truths."""
    edits = sum(Levenshtein.distance(truth, answer) for truth, answer in zip(truths, answers, strict=True))
    return edits / sum(map(len, truths))


@torch.no_grad()
def read(reader: Reader, pictures: Sequence[Picture], text: str | None = None, most: int = 520) -> list[str]:
    """Read pictures greedily, those of one grid together, and give their texts in order; `text` None is a silent prompt."""
    text = reader.form.silent if text is None else text
    groups: dict[tuple[int, int], list[tuple[int, Tensor]]] = defaultdict(list)
    for index, picture in enumerate(pictures):
        placed = place(picture.pixels, reader.form.unit)
        groups[placed.grid].append((index, torch.from_numpy(placed.pixels)))
    answers = [""] * len(pictures)
    for grid, members in groups.items():
        canvases = torch.stack([canvas for _, canvas in members])
        limit = most if grid[0] * grid[1] > 16 else 96
        for (index, _), ids in zip(members, _decode(reader, canvases, grid, text, limit), strict=True):
            answers[index] = prompt.decode(ids)
    return answers


def _decode(
    reader: Reader, canvases: Tensor, grid: tuple[int, int], text: str, most: int, pictures: int = 1
) -> list[list[int]]:
    """Answer turns of so many pictures each, canvases (turns * pictures, H, W), with at most `most` tokens."""
    form = reader.form
    start = form.prompt_ids([grid[0] * grid[1]] * pictures, text)
    count = len(canvases) // pictures
    positions = turn_positions(start + [0] * most, grid, form.image)
    _, tokens, deep = reader.see(cut_patches(canvases, form.unit // 2), grid)
    model = reader.model.model.language_model
    columns = torch.tensor([index for index, token in enumerate(start) if token == form.image])
    states = place_tokens(model.embed_tokens(torch.tensor(start).expand(count, -1)), tokens, columns)
    cosine, sine = model.rotary_emb(states, positions[:, None])
    keys: list[Tensor] = [torch.empty(0)] * len(model.layers)
    values: list[Tensor] = [torch.empty(0)] * len(model.layers)
    done = torch.zeros(count, dtype=torch.bool)
    ids: list[Tensor] = []
    place_now = 0
    for step in range(most):
        length = states.shape[1]
        turn = cosine[:, place_now : place_now + length], sine[:, place_now : place_now + length]
        for index, layer in enumerate(model.layers):
            query, key, value = reader.split(layer, states, *turn)
            if step:
                key = torch.cat([keys[index], key], dim=2)
                value = torch.cat([values[index], value], dim=2)
            keys[index], values[index] = key, value
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=step == 0, enable_gqa=True)
            states = reader.close(layer, states, mixed)
            if step == 0 and index < len(deep):
                states = add_tokens(states, deep[index], columns)
        place_now += length
        chosen = reader.model.lm_head(model.norm(states[:, -1])).argmax(-1)
        chosen = torch.where(done, form.pad, chosen)
        ids.append(chosen)
        done |= (chosen == form.end) | (chosen == form.pad)
        if bool(done.all()):
            break
        states = model.embed_tokens(chosen)[:, None]
    return [[token for token in row if token < 256] for row in torch.stack(ids, dim=1).tolist()]


def _measure_pairs(reader: Reader, lines: list[Picture]) -> float:
    """Read lines of one grid two to a turn and give the error rate of their joined texts."""
    canvases = torch.stack([torch.from_numpy(place(picture.pixels, reader.form.unit).pixels) for picture in lines])
    with torch.no_grad():
        answers = [prompt.decode(ids) for ids in _decode(reader, canvases, (1, 8), reader.form.silent, 96, pictures=2)]
    truths = [f"{first.text}\n{second.text}" for first, second in zip(lines[::2], lines[1::2], strict=True)]
    return error_rate(truths, answers)


def measure(reader: Reader) -> dict[str, object]:
    """Read the held-out pictures of every kind and the sample receipt; give error rates, exact shares and examples."""
    result: dict[str, object] = {}
    for kind, count in (("line", 300), ("scramble", 300), ("few", 60), ("receipt", 30)):
        pictures = held_out(kind, count)
        answers = read(reader, pictures)
        truths = [picture.text for picture in pictures]
        exact = sum(truth == answer for truth, answer in zip(truths, answers, strict=True))
        result[kind] = {
            "pictures": count,
            "characters": sum(map(len, truths)),
            "error_rate": round(error_rate(truths, answers), 5),
            "exact": exact,
        }
    for text in ("", *reader.form.tasks, reader.form.questions[0], "Is there a date in it?"):
        pictures = held_out("line", 60)
        rate = error_rate([picture.text for picture in pictures], read(reader, pictures, text))
        result[f"line, asked {text!r}"] = {"error_rate": round(rate, 5)}
    lines = [picture for picture in held_out("line", 300) if place(picture.pixels, reader.form.unit).grid == (1, 8)][
        :100
    ]
    result["pair"] = {"error_rate": round(_measure_pairs(reader, lines), 5), "turns": len(lines) // 2}
    receipt = sample_receipt()
    [answer] = read(reader, [receipt], reader.form.tasks[0])
    result["sample"] = {"error_rate": round(error_rate([receipt.text], [answer]), 5), "answer": answer.split("\n")}
    return result
