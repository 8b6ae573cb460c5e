"""Training batches of equal canvas size, drawn from the page generator without end.

Shapes: B pictures, N patches each, V = N / 4 visual tokens, S sequence length, A answer length with its end token.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from make_pages import CHARACTERS, DAMAGES, KINDS, Picture, Words, draw_line, draw_receipt, draw_style
from training import prompt
from training.canvas import place
from training.forward import SLOTS, cut_patches
from training.prompt import Form

IGNORED = -100
PAGE_KINDS = ("form", "table", "text")
_CLASS = {character: index + 1 for index, character in enumerate(CHARACTERS)}


@dataclass(frozen=True)
class Mix:
    """Shares of the picture kinds and of the prompts.

    `glimpse` one to three characters; `line`, `scramble` single lines; `few` two to four lines; `receipt` up to sixteen; `form`,
    `table` and `text` those of `pages.kinds`. `damaged` is the share of pictures with one of the damages of `pages.damage`.
    `spoken` is the share of batches whose prompt has a text, `pairs` that of two pictures to a turn. `pitch` bounds the
    distance of baselines in pixels. `crowded` is the share of pages passed over because no two of their lines share a row of
    visual tokens.
    """

    glimpse: float = 0.0
    line: float = 1.0
    scramble: float = 0.0
    few: float = 0.0
    receipt: float = 0.0
    form: float = 0.0
    table: float = 0.0
    text: float = 0.0
    damaged: float = 0.0
    spoken: float = 0.2
    pairs: float = 0.1
    crowded: float = 0.0
    pitch: tuple[float, float] = (22.0, 34.0)


@dataclass(frozen=True)
class Sample:
    """One picture on its canvas with its targets.

    `canvas` (H, W) uint8; `characters` and `spaced` (N, 3): class of each character whose centre lies in a patch, zero for
    none, and whether a space stands before it; `patches` (A - 1,): the patch of each character, -1 for spaces.
    """

    canvas: NDArray[np.uint8]
    grid: tuple[int, int]
    text: str
    characters: NDArray[np.int64]
    spaced: NDArray[np.float32]
    patches: NDArray[np.int64]


@dataclass(frozen=True)
class Batch:
    """Tensors of a training step: see `Sample`; `ids` (B, S), `labels` (B, A), `reading` and `upcoming` (B, A) patches."""

    patches: Tensor
    grid: tuple[int, int]
    characters: Tensor
    spaced: Tensor
    ids: Tensor
    positions: Tensor
    answer: int
    labels: Tensor
    reading: Tensor
    upcoming: Tensor


def prepare(picture: Picture, form: Form = prompt.QWEN3VL) -> Sample:
    """Lay a picture on its canvas and say which patch and block each character falls in."""
    placed = place(picture.pixels, form.unit)
    side = form.unit // 2
    columns = placed.grid[1]
    centres = picture.centres * placed.scale + placed.offset
    printed = ~np.isnan(centres[:, 0])
    across = np.floor(np.nan_to_num(centres[:, 0]) / side).astype(np.int64).clip(0, 2 * columns - 1)
    down = np.floor(np.nan_to_num(centres[:, 1]) / side).astype(np.int64).clip(0, 2 * placed.grid[0] - 1)
    blocks = (down // 2) * columns + across // 2
    patches = blocks * 4 + (down % 2) * 2 + across % 2
    count = placed.grid[0] * columns * 4
    characters = np.zeros((count, SLOTS), np.int64)
    spaced = np.zeros((count, SLOTS), np.float32)
    filled = np.zeros(count, np.int64)
    for index, character in enumerate(picture.text):
        patch = patches[index]
        if printed[index] and filled[patch] < SLOTS:
            characters[patch, filled[patch]] = _CLASS[character]
            spaced[patch, filled[patch]] = index > 0 and picture.text[index - 1] == " "
            filled[patch] += 1
    return Sample(placed.pixels, placed.grid, picture.text, characters, spaced, np.where(printed, patches, -1))


def crowded(sample: Sample) -> bool:
    """Say whether two lines stand in one row of visual tokens, which is what reading a page finds hardest."""
    patches = sample.patches[sample.patches >= 0]
    rows = patches // 4 // sample.grid[1]
    return any(len(set(patches[rows == row] % 4 // 2)) > 1 for row in set(rows))


def draw_picture(random: np.random.Generator, words: Words, mix: Mix) -> Picture:
    """Draw one picture of a mix."""
    picture = draw_undamaged(random, words, mix)
    if not mix.damaged or random.random() >= mix.damaged:
        return picture
    return DAMAGES[words.pick(list(DAMAGES))](picture, random)


def draw_undamaged(random: np.random.Generator, words: Words, mix: Mix) -> Picture:
    """Draw one picture of a mix as it is printed. What a seed gives depends on the kinds of the mix alone."""
    shares = np.array(
        [mix.glimpse, mix.line, mix.scramble, mix.few, mix.receipt, *(getattr(mix, kind) for kind in PAGE_KINDS)]
    )
    kind = int(random.choice(len(shares), p=shares / shares.sum()))
    style = draw_style(random)
    if kind > 4:
        return KINDS[PAGE_KINDS[kind - 5]](words, style, random).picture
    if kind == 0:
        text = words.scramble(3) if random.random() < 0.7 else words.digits(int(random.integers(1, 4)))
        return draw_line(text, style, random)
    if kind in (1, 2):
        return draw_line(words.line() if kind == 1 else words.scramble(), style, random)
    least = 1.15 * style.size
    if kind == 3:
        # Two narrowly set lines on a small canvas are the cheapest lesson in two lines that share a row of visual tokens;
        # the blank keeps them from standing symmetrically about the border of two such rows.
        count = int(random.choice([2, 2, 3, 4]))
        pitch = float(random.uniform(least, least + 9))
        return draw_receipt(words, style, random, count, int(random.integers(90, 257)), pitch, 0.2, blank=44.0)
    pitch = max(float(random.uniform(*mix.pitch)), least)
    count = int(random.integers(4, 17))
    # Beyond 256 px a tall receipt takes a canvas twice as large, half of it empty: rarely worth its work.
    width = int(random.integers(160, 289 if random.random() < 0.05 else 257))
    return draw_receipt(words, style, random, count, width, min(pitch, 480 / count), 0.1, blank=20.0)


def turn_positions(ids: Sequence[int], grid: tuple[int, int], image: int) -> Tensor:
    """Give the three rows of rotary positions (3, S) of ids whose pictures, of tokens `image`, all have one grid."""
    rows, columns = grid
    down = torch.arange(rows).repeat_interleave(columns)
    across = torch.arange(columns).repeat(rows)
    parts, now, index = [], 0, 0
    while index < len(ids):
        if ids[index] == image:
            parts.append(now + torch.stack([torch.zeros_like(down), down, across]))
            now, index = now + max(grid), index + rows * columns
        else:
            parts.append(torch.full((3, 1), now))
            now, index = now + 1, index + 1
    return torch.cat(parts, dim=1)


def join(first: Sample, second: Sample) -> Sample:
    """Make one sample of two pictures of one grid whose texts are read one after the other."""
    count = len(first.characters)
    return Sample(
        canvas=np.stack([first.canvas, second.canvas]),
        grid=first.grid,
        text=f"{first.text}\n{second.text}",
        characters=np.concatenate([first.characters, second.characters]),
        spaced=np.concatenate([first.spaced, second.spaced]),
        patches=np.concatenate([first.patches, [-1], np.where(second.patches < 0, -1, second.patches + count)]),
    )


def _guides(sample: Sample) -> tuple[list[int], list[int]]:
    """Give, per answer step, the patch of the character just read and of the one to come; -1 when there is none."""
    reading, last = [-1], -1
    for patch in sample.patches:
        last = int(patch) if patch >= 0 else last
        reading.append(last)
    upcoming = [last]
    following = last
    for text, patch in zip(reversed(sample.text), reversed(sample.patches), strict=True):
        following = int(patch) if patch >= 0 else following
        upcoming.append(-2 if text == "\n" else following)
    upcoming.reverse()
    return reading, [reading[index] if patch == -2 else patch for index, patch in enumerate(upcoming)]


def collate(samples: list[Sample], text: str, longest: int, form: Form = prompt.QWEN3VL) -> Batch:
    """Make the tensors of a step from samples of one grid and one prompt text, answers padded to `longest` tokens."""
    grid = samples[0].grid
    pictures = len(samples[0].characters) // (4 * grid[0] * grid[1])
    start = form.prompt_ids([grid[0] * grid[1]] * pictures, text)
    answers = [[*prompt.encode(sample.text), form.end] for sample in samples]
    size = (len(samples), longest)
    labels, reading, upcoming = (torch.full(size, fill) for fill in (IGNORED, -1, -1))
    ids = torch.full((len(samples), len(start) + longest - 1), form.pad)
    ids[:, : len(start)] = torch.tensor(start)
    for row, (sample, answer) in enumerate(zip(samples, answers, strict=True)):
        labels[row, : len(answer)] = torch.tensor(answer)
        ids[row, len(start) : len(start) + len(answer) - 1] = torch.tensor(answer[:-1])
        seen, coming = _guides(sample)
        reading[row, : len(answer)] = torch.tensor(seen)
        upcoming[row, : len(answer)] = torch.tensor(coming)
    canvases = np.stack([sample.canvas for sample in samples])
    return Batch(
        patches=cut_patches(torch.from_numpy(canvases.reshape(-1, *canvases.shape[-2:])), form.unit // 2),
        grid=grid,
        characters=torch.from_numpy(np.stack([sample.characters for sample in samples])),
        spaced=torch.from_numpy(np.stack([sample.spaced for sample in samples])),
        ids=ids,
        positions=turn_positions(ids[0].tolist(), grid, form.image),
        answer=len(start) - 1,
        labels=labels,
        reading=reading,
        upcoming=upcoming,
    )


def cost(tokens: int, characters: int) -> float:
    """Give the work of training on a picture in units of one short-context decoder token.

    Patches weigh two thirds of a decoder token, and both grow with the square of their number through attention; the
    constants follow the matrix sizes and keep two processes of unlike batches in step.
    """
    patches, length = 4 * tokens, tokens + characters + 21
    return 0.67 * patches * (1 + patches / 650) + length * (1 + length / 1500)


class Stream:
    """Endless batches of about equal `cost`."""

    def __init__(self, seed: int, mix: Mix, budget: int, form: Form = prompt.QWEN3VL) -> None:
        self.random = np.random.default_rng(seed)
        self.words = Words(self.random, held_out=False)
        self.mix = mix
        self.budget = budget
        self.form = form
        self.pools: dict[tuple[int, int, int], list[Sample]] = defaultdict(list)

    def __iter__(self) -> Iterator[Batch]:
        while True:
            sample = prepare(draw_picture(self.random, self.words, self.mix), self.form)
            if "\n" in sample.text and self.random.random() < self.mix.crowded and not crowded(sample):
                continue
            tokens = sample.grid[0] * sample.grid[1]
            # Answers of like length share a batch, so that little of it is padding; all batches of a pool have one shape,
            # because the matrix library keeps memory for every shape it meets.
            width = 10 if tokens <= 32 else 40
            longest = width * (len(sample.text) // width + 1)
            pool = self.pools[(*sample.grid, longest)]
            pool.append(sample)
            if len(pool) * cost(tokens, longest) >= self.budget:
                if len(pool) > 8 and self.random.random() < self.mix.pairs:
                    half = len(pool) // 2
                    pairs = [
                        join(first, second) for first, second in zip(pool[:half], pool[half : 2 * half], strict=True)
                    ]
                    yield collate(pairs, self._text(), 2 * longest, self.form)
                else:
                    yield collate(pool, self._text(), longest, self.form)
                pool.clear()

    def _text(self) -> str:
        if self.random.random() >= self.mix.spoken:
            return self.form.silent
        choice = self.random.random()
        if choice < 0.5:
            return self.form.tasks[0]
        if choice < 0.8:
            return self.words.pick(list(self.form.tasks))
        return self.words.pick(list(self.form.questions))
