"""Streams a safetensors checkpoint into a module built on the meta device.

The seam: a model package knows what its tensors are called and how they are fused; this file knows files. A package hands over
its module and a list of `Rule`s; every name, shape and file is checked from the headers before a byte of data is read, and then
the tensors are copied a few megabytes at a time straight to their place. So a load takes the memory of the weights and little
more, and a checkpoint that does not fit the model fails at once with the names that are wrong.

Pages of a mapped file count as resident memory of the process for as long as the mapping lives, which would double the peak of
a single-file checkpoint; so a file is opened anew for every batch of runs. (safetensors' `pread` backend is no way out: its
slices read the whole tensor each time.)
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kaminari_core.checkpoint_files import INDEX_FILE as INDEX_FILE
from kaminari_core.checkpoint_files import SINGLE_FILE as SINGLE_FILE
from kaminari_core.checkpoint_files import Entry, opened, read_entries
from kaminari_core.errors import CheckpointError
from kaminari_core.headers import few
from kaminari_core.headers import read_json as read_json
from kaminari_core.kernels.library import on_large_pages
from kaminari_core.protocols import Progress
from kaminari_core.quantization.layouts import LayoutName
from kaminari_core.quantization.loading import CONVERTED, Packed, Part, fill_all, open_packed, shared_layers

_RUN_BYTES = 32 * 2**20
_MAPPED_BYTES = 256 * 2**20
_SOURCES = "_kaminari_sources"
_FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rule:
    """Where the checkpoint tensors whose whole name matches `pattern` go.

    `target` is the parameter's name in the module, a template for `re.Match.expand`. `rows`, (start, stop), makes the tensor that
    part of a fused parameter along its first dimension; the parts must cover the parameter. `transposed` says that the last
    two dimensions may stand the other way round on disk; the tensor's own shape decides, as in transformers.
    """

    pattern: str
    target: str
    rows: tuple[int, int] | None = None
    transposed: bool = False


def fused(pattern: str, target: str, **parts: int) -> list[Rule]:
    """One rule for each part of a fused parameter; `parts` are their row counts in order, `{}` in the pattern their names."""
    found, start = [], 0
    for name, rows in parts.items():
        found.append(Rule(pattern.format(name), target, rows=(start, start + rows)))
        start += rows
    return found


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor of the checkpoint that fills a parameter: rows from `first_row` on, all of them when it is the only one.

    `name` is what the checkpoint calls, or would call, the parameter's own tensor; `of` is another tensor where it has none and
    shares that one.
    """

    name: str
    first_row: int
    of: str
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class _Copy:
    """One tensor and its place: rows [start, stop) of `target`, or all of it when `rows` is None."""

    entry: Entry
    target: str
    rows: tuple[int, int] | None
    transposed: bool


@dataclass(frozen=True, slots=True)
class _Run:
    """Rows [start, stop) of one tensor on disk."""

    copy: _Copy
    start: int
    stop: int
    bytes: int


@dataclass(slots=True)
class _Plan:
    """What to copy, and what is wrong with the checkpoint."""

    copies: list[_Copy] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def load_weights(
    module: nn.Module,
    directory: Path,
    rules: Sequence[Rule],
    *,
    device: torch.device,
    dtype: torch.dtype,
    ties: Mapping[str, str] | None = None,
    copies: Mapping[str, str] | None = None,
    ignore: Sequence[str] = (),
    progress: Progress | None = None,
    layout: LayoutName = "auto",
) -> None:
    """Fill every parameter of `module`, which is on meta, from the safetensors files of `directory`.

    Parameters end up on `device`, as `dtype`, without gradients. `ties` maps a parameter to the one whose tensor it shares when
    the checkpoint has no tensor of its own; when it has one that is equal, the two are shared as well, and when it differs, both
    are kept and a warning is logged, as in transformers. `copies` are the same without a warning. Tensors whose whole name
    matches a pattern of `ignore` are skipped.
    `progress` is called as `("weights", bytes done, bytes in all)`.

    In a packed directory (see `quantization.manifest`) the linear layers of converted weights become `QuantizedLinear`, with the
    `layout` given. On the device `meta` everything is checked and swapped, and nothing read. Either way, `sources` tells
    afterwards which tensors fill which parameter.

    Raises CheckpointError for files that are missing or damaged, and for tensors that are missing, unexpected or of another shape
    than the model's; the message names the first few and counts the rest.
    """
    copies = copies or {}
    ties = {**(ties or {}), **copies}
    expected = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    packed = open_packed(directory)
    plan = _plan(_entries(directory, packed), expected, rules, ignore)
    missing = _missing(plan.copies, expected)
    absent = {target: source for target, source in ties.items() if target in missing and source not in missing}
    _raise_for(directory, plan, [name for name in missing if name not in absent])
    setattr(module, _SOURCES, _sources(plan.copies, rules, absent))
    parts, plain = _parts(plan.copies), [copy for copy in plan.copies if copy.entry.dtype != CONVERTED]
    shared = shared_layers(packed, parts, ties, absent) if packed is not None else set()
    parts = [part for part in parts if part.target not in shared]
    layers = packed.swap(module, parts, layout) if packed is not None else {}
    if device.type == "meta":
        placed = {copy.target: torch.empty(expected[copy.target], device=device, dtype=dtype) for copy in plain}
    else:
        report = _Report(progress, plain, parts, packed)
        placed = _copy_all(plain, expected, device, dtype, report)
        if packed is not None:
            fill_all(packed, layers, parts, device, dtype, report)
    for name, tensor in placed.items():
        _set_parameter(module, name, nn.Parameter(tensor, requires_grad=False))
    for target, source in ties.items():
        if target in shared:
            module.set_submodule(_owner(target), layers[_owner(source)])
        elif _owner(target) not in layers and _owner(source) not in layers:
            _tie(module, target, source, own=target not in absent, warn=target not in copies)
    left = [name for name, tensor in _tensors(module) if tensor.is_meta and device.type != "meta"]
    assert not left, f"tensors left on meta after loading: {left}"


def sources(module: nn.Module) -> Mapping[str, tuple[Source, ...]]:
    """Which tensors of the checkpoint fill each parameter, by its name in a module that `load_weights` has loaded.

    Empty for any other module. Parameters whose layer was swapped are listed under the name that they had.
    """
    found: Mapping[str, tuple[Source, ...]] = getattr(module, _SOURCES, {})
    return found


def tensor_names(directory: Path) -> frozenset[str]:
    """The names of a checkpoint's tensors, from the headers of its files. Raises CheckpointError as `load_weights` does."""
    return frozenset(_entries(directory, open_packed(directory)))


def _entries(directory: Path, packed: Packed | None) -> dict[str, Entry]:
    return read_entries(directory) | (packed.entries if packed is not None else {})


def _parts(copies: Sequence[_Copy]) -> list[Part]:
    """Those that come from the sidecar."""
    converted = [copy for copy in copies if copy.entry.dtype == CONVERTED]
    return [Part(copy.entry.name, copy.target, copy.rows[0] if copy.rows else 0) for copy in converted]


def _sources(
    copies: Sequence[_Copy], rules: Sequence[Rule], absent: Mapping[str, str]
) -> dict[str, tuple[Source, ...]]:
    found: dict[str, tuple[Source, ...]] = {}
    for copy in copies:
        own = Source(copy.entry.name, copy.rows[0] if copy.rows else 0, copy.entry.name, copy.transposed)
        found[copy.target] = (*found.get(copy.target, ()), own)
    for target, source in absent.items():
        name = next((name for rule in rules if rule.target == target and (name := _literal(rule.pattern))), None)
        if name is not None and len(found[source]) == 1:
            found[target] = (Source(name, 0, found[source][0].name),)
    return found


def _literal(pattern: str) -> str | None:
    """The one name that a pattern matches, None when it may match several."""
    name = pattern.replace(r"\.", ".")
    return name if re.escape(name) == pattern else None


def _plan(
    entries: Mapping[str, Entry], expected: Mapping[str, tuple[int, ...]], rules: Sequence[Rule], ignore: Sequence[str]
) -> _Plan:
    plan = _Plan()
    compiled = [(re.compile(rule.pattern), rule) for rule in rules]
    ignored = [re.compile(pattern) for pattern in ignore]
    for name, entry in entries.items():
        if any(pattern.fullmatch(name) for pattern in ignored):
            continue
        found = next(((match, rule) for pattern, rule in compiled if (match := pattern.fullmatch(name))), None)
        target = found[0].expand(found[1].target) if found else ""
        if found is None or target not in expected:
            plan.unexpected.append(name)
            continue
        _place(plan, entry, target, found[1], expected[target])
    return plan


def _place(plan: _Plan, entry: Entry, target: str, rule: Rule, shape: tuple[int, ...]) -> None:
    if rule.rows is not None:
        shape = (rule.rows[1] - rule.rows[0], *shape[1:])
    turned = rule.transposed and entry.shape != shape
    fits = entry.shape == ((*shape[:-2], shape[-1], shape[-2]) if turned else shape)
    if not fits:
        plan.wrong.append(f"{entry.name} is {list(entry.shape)}, but the model has {list(shape)}")
    elif entry.dtype not in _FLOATS and entry.dtype != CONVERTED:
        plan.wrong.append(f"{entry.name} is {entry.dtype}, but must be one of {', '.join(_FLOATS)}")
    plan.copies.append(_Copy(entry, target, rule.rows, turned))


def _missing(copies: Iterable[_Copy], expected: Mapping[str, tuple[int, ...]]) -> list[str]:
    """The parameters that no tensor fills, or only in part."""
    filled = dict.fromkeys(expected, 0)
    for copy in copies:
        filled[copy.target] += expected[copy.target][0] if copy.rows is None else copy.rows[1] - copy.rows[0]
    over = [name for name, rows in filled.items() if rows > expected[name][0]]
    assert not over, f"two rules fill the same rows of {over}"
    return [name for name, rows in filled.items() if rows < expected[name][0]]


def _raise_for(directory: Path, plan: _Plan, missing: list[str]) -> None:
    problems = [("missing from it", missing), ("in it that the model does not have", plan.unexpected)]
    lines = [f"{len(names)} tensors are {where}: {few(names)}" for where, names in problems if names]
    if plan.wrong:
        lines.append(f"{len(plan.wrong)} tensors do not fit: {few(plan.wrong)}")
    if lines:
        raise CheckpointError(f"the checkpoint {directory} is not what its config.json describes: " + "; ".join(lines))


def _copy_all(
    copies: Sequence[_Copy],
    expected: Mapping[str, tuple[int, ...]],
    device: torch.device,
    dtype: torch.dtype,
    report: Callable[[int], None],
) -> dict[str, Tensor]:
    placed: dict[str, Tensor] = {}
    for batch in _batches(copies):
        with opened(batch[0].copy.entry.file) as tensors:
            for run in batch:
                target = run.copy.target
                if target not in placed:
                    placed[target] = on_large_pages(torch.empty(expected[target], device=device, dtype=dtype))
                _fill(placed[target], tensors.get_slice(run.copy.entry.name), run)
                report(run.bytes)
    return placed


def _batches(copies: Sequence[_Copy]) -> Iterator[list[_Run]]:
    """Runs in the order of the files, in lists of one file and at most about `_MAPPED_BYTES` each."""
    batch: list[_Run] = []
    for copy in sorted(copies, key=lambda copy: copy.entry.file):
        for run in _runs(copy):
            full = sum(earlier.bytes for earlier in batch) + run.bytes > _MAPPED_BYTES
            if batch and (full or batch[0].copy.entry.file != copy.entry.file):
                yield batch
                batch = []
            batch.append(run)
    if batch:
        yield batch


def _runs(copy: _Copy) -> Iterator[_Run]:
    """One tensor in runs of rows, so that only one run of it is in memory twice."""
    count, size = copy.entry.shape[0], _bytes(copy.entry)
    step = max(1, _RUN_BYTES * count // max(1, size))
    for start in range(0, count, step):
        stop = min(count, start + step)
        yield _Run(copy, start, stop, size * (stop - start) // count)


def _fill(whole: Tensor, source: Any, run: _Run) -> None:
    rows = source[run.start : run.stop]
    first = run.start + (run.copy.rows[0] if run.copy.rows else 0)
    whole[first : first + len(rows)] = rows.transpose(-1, -2) if run.copy.transposed else rows


class _Report:
    """Adds up what was read, and tells."""

    def __init__(
        self, progress: Progress | None, copies: Iterable[_Copy], parts: Iterable[Part], packed: Packed | None
    ) -> None:
        self._progress, self._done = progress, 0
        self._total = sum(_bytes(copy.entry) for copy in copies)
        self._total += sum(packed.bytes(part.name) for part in parts) if packed is not None else 0

    def __call__(self, size: int) -> None:
        self._done += size
        if self._progress is not None:
            self._progress("weights", self._done, self._total)


def _tie(module: nn.Module, target: str, source: str, *, own: bool, warn: bool) -> None:
    shared = module.get_parameter(source)
    if own and (shared.is_meta or not torch.equal(module.get_parameter(target), shared)):
        if warn and not shared.is_meta:
            _log.warning(
                "config.json ties %s to %s, but the checkpoint has different tensors for them: both are kept",
                target,
                source,
            )
        return
    _set_parameter(module, target, shared)


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _set_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    setattr(module.get_submodule(_owner(name)), name.rpartition(".")[2], parameter)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _bytes(entry: Entry) -> int:
    size = _FLOATS[entry.dtype]
    for length in entry.shape:
        size *= length
    return size
