"""Items about the plugin and its files: it is found without loading anything heavy, and the checkpoint decides every size."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from kaminari_core.check.outcome import Outcome, failed, judged, not_applicable, passed
from kaminari_core.check.subject import Subject, describe
from kaminari_core.checkpoint import resolve_checkpoint
from kaminari_core.protocols import DraftingModel, Model

HEAVY = ("torch", "transformers", "numpy", "PIL")
SIZES: Mapping[str, str] = {
    "num_hidden_layers": "layers", "n_layer": "layers", "hidden_size": "hidden", "n_embd": "hidden",
    "num_attention_heads": "heads", "n_head": "heads", "num_key_value_heads": "kv_heads", "head_dim": "head_dim",
    "vocab_size": "vocabulary", "max_position_embeddings": "max_positions", "n_positions": "max_positions",
}  # fmt: skip
"""What files call the sizes of a decoder, and the field of `ModelShape` that each becomes."""
CONSTANTS = ("rope_theta", "rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps")
_NESTED = ("rope_parameters", "rope_scaling")
_IMPORT = "import importlib, sys; importlib.import_module(sys.argv[1]); print(*(set(sys.argv[2:]) & set(sys.modules)))"


def registration(subject: Subject) -> Outcome:
    """The plugin's facts lead to things that exist."""
    spec = subject.spec
    spec.load()
    if spec.reference is not None:
        spec.load_reference()
    for name in spec.bundled:
        resolve_checkpoint(spec, name)
    if not spec.model_types:
        return failed("the plugin names no model_types, so a checkpoint directory cannot find its model")
    return passed(
        f"{spec.target}; model types {', '.join(spec.model_types)}; {len(spec.tasks)} tasks, {len(spec.bundled)} "
        f"bundled checkpoints, reference {spec.reference or 'none'}",
        tasks=len(spec.tasks),
        bundled=len(spec.bundled),
    )


def lazy_import(subject: Subject) -> Outcome:
    """The module that the entry point names is imported in a fresh interpreter, and brings nothing heavy along."""
    plugin = subject.registry.offering(subject.spec.name)
    module = plugin.target.partition(":")[0]
    started = time.perf_counter()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", _IMPORT, module, *HEAVY]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    seconds = time.perf_counter() - started
    if done.returncode:
        return failed(f"importing {module} alone fails: {done.stderr.strip().splitlines()[-1]}")
    heavy = sorted(done.stdout.split())
    return judged(
        not heavy,
        f"{module} imports {', '.join(heavy) or 'nothing heavy'} ({seconds:.2f} s)",
        ["an import at the top of the plugin module; `kaminari --help` would wait for it"],
        seconds=round(seconds, 3),
    )


def loading(subject: Subject) -> Outcome:
    """The checkpoint loads, and the result has every member of the protocol."""
    started = time.perf_counter()
    model = subject.model
    seconds = time.perf_counter() - started
    names = [*Model.__annotations__, *(name for name in vars(Model) if not name.startswith("_"))]
    if model.shape.draft_layers:
        names += [name for name in vars(DraftingModel) if not name.startswith("_")]
    missing = [name for name in names if not hasattr(model, name)]
    if missing:
        return failed(f"the model has no {', '.join(missing)}")
    if model.dtype != torch.float32:
        return failed(f"the model was asked for float32 and computes in {model.dtype}")
    shape = model.shape
    return passed(
        f"{shape.layers} layers of {shape.hidden}, {shape.heads} heads over {shape.kv_heads} of {shape.head_dim}, "
        f"{shape.vocabulary} tokens, in {seconds:.1f} s",
        seconds=round(seconds, 2),
        layers=shape.layers,
    )


def configuration(subject: Subject) -> Outcome:
    """Changing a number in a copy of config.json changes the model, or stops it from loading: no default takes its place."""
    top = json.loads((subject.checkpoint / "config.json").read_text(encoding="utf-8"))
    read: list[str] = []
    ignored: list[str] = []
    for key, place in _numbers(top):
        (read if _is_read(subject, top, place, key) else ignored).append(key)
    if not read and not ignored:
        return not_applicable("config.json has none of the usual names for sizes")
    suspects = [f"a class default, or the value of another file, stands in for {', '.join(ignored)}"]
    detail = f"{len(read)} of {len(read) + len(ignored)} values of config.json decide: {', '.join(read)}"
    return judged(not ignored, detail, suspects, values=len(read))


def _numbers(top: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The decoder's numbers that are known by name, each with the object it stands in."""
    decoder = top["text_config"] if isinstance(top.get("text_config"), dict) else top
    for place in (decoder, *(decoder[name] for name in _NESTED if isinstance(decoder.get(name), dict))):
        for key in (*SIZES, *CONSTANTS):
            if isinstance(place.get(key), int | float):
                yield key, place


def _is_read(subject: Subject, top: Mapping[str, Any], place: dict[str, Any], key: str) -> bool:
    """Whether the model that a changed file describes is another one. `place` is part of `top` and is put back."""
    kept = place[key]
    place[key] = kept // 2 if SIZES.get(key) == "max_positions" else kept * 2 if key in SIZES else kept * 10 + 0.1
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for file in subject.checkpoint.iterdir():
                if file.name != "config.json":
                    (folder / file.name).symlink_to(file.resolve())
            (folder / "config.json").write_text(json.dumps(top), encoding="utf-8")
            changed = subject.load(folder)
            if key in SIZES:
                return changed.shape != subject.model.shape
            return not torch.equal(_first_logits(subject, changed), _first_logits(subject, subject.model))
    except Exception:
        # Weights that do not fit the changed description are the other proof that it was read.
        return True
    finally:
        place[key] = kept


def _first_logits(subject: Subject, model: Model) -> torch.Tensor:
    cache = subject.cache(model, dataclasses.replace(subject.config, slots=1))
    prepared = model.prepare(subject.requests["text"])
    with torch.inference_mode():
        return model.prefill(model.embed(prepared), 0, prepared.length, cache, cache.claim())


def load_failure(subject: Subject) -> str | None:
    """Why the checkpoint does not load, None when it does."""
    try:
        _ = subject.model
    except Exception as error:
        return describe(error)
    return None
