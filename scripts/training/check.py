"""Proof that the training forward and the reading loop do what the library does on the files a user gets."""

from __future__ import annotations

from pathlib import Path

import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoTokenizer

from make_pages import Picture
from training.canvas import place
from training.evaluate import read
from training.forward import Reader

LIMIT = 1e-3


def check(reader: Reader, folder: Path, pictures: list[Picture]) -> None:
    """Read pictures with the library's own processor, tokenizer and `generate`; raise when our answers differ."""
    model, form = reader.model.eval(), reader.form
    tokenizer = AutoTokenizer.from_pretrained(folder)
    processor = AutoImageProcessor.from_pretrained(folder)
    pad = tokenizer.convert_ids_to_tokens(form.image)
    for picture in pictures:
        placed = place(picture.pixels, form.unit)
        image = Image.fromarray(placed.pixels).convert("RGB")
        inputs = processor(images=[image], do_resize=False, return_tensors="pt")
        turn = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": form.tasks[0]}]}]
        text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text.replace(pad, pad * (placed.grid[0] * placed.grid[1])), return_tensors="pt").input_ids
        with torch.no_grad():
            answer = model.generate(
                input_ids=ids,
                mm_token_type_ids=(ids == form.image).long(),
                max_new_tokens=520,
                do_sample=False,
                **inputs,
            )
        theirs = tokenizer.decode(answer[0, ids.shape[1] :], skip_special_tokens=True)
        [ours] = read(reader, [picture], form.tasks[0])
        if ours != theirs:
            raise RuntimeError(f"the library reads {theirs!r}, the training loop {ours!r}")
