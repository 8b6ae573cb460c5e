"""Proof that the training forward and the reading loop do what the library does on the files a user gets."""

from __future__ import annotations

from pathlib import Path

import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoTokenizer

from make_pages import Picture
from training import prompt
from training.canvas import place
from training.evaluate import read
from training.folder import load
from training.forward import Reader

LIMIT = 1e-3


def check(folder: Path, pictures: list[Picture]) -> None:
    """Read pictures with the library's own processor, tokenizer and `generate`; raise when our answers differ."""
    model = load(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    processor = AutoImageProcessor.from_pretrained(folder)
    reader = Reader(model)
    for picture in pictures:
        placed = place(picture.pixels)
        image = Image.fromarray(placed.pixels).convert("RGB")
        inputs = processor(images=[image], do_resize=False, return_tensors="pt")
        turn = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": prompt.TASKS[0]}]}]
        text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        pad = prompt.SPECIALS[prompt.IMAGE_PAD - 256]
        ids = tokenizer(text.replace(pad, pad * (placed.grid[0] * placed.grid[1])), return_tensors="pt").input_ids
        with torch.no_grad():
            answer = model.generate(
                input_ids=ids,
                mm_token_type_ids=(ids == prompt.IMAGE_PAD).long(),
                max_new_tokens=520,
                do_sample=False,
                **inputs,
            )
        theirs = tokenizer.decode(answer[0, ids.shape[1] :], skip_special_tokens=True)
        [ours] = read(reader, [picture], prompt.TASKS[0])
        if ours != theirs:
            raise RuntimeError(f"the library reads {theirs!r}, the training loop {ours!r}")
