"""Turns a checkpoint into a packed directory: quantizes what is to be converted, copies the rest byte for byte, and checks it.

Everything streams: a few rows of one weight are in memory at a time, and with them nothing else of the checkpoint. The directory
is written under a temporary name, loaded on the device `meta` by the model's own package to see that it is complete and that
nothing but the chosen layers was converted, and renamed only then.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from kaminari_core import __version__
from kaminari_core.config import EngineConfig
from kaminari_core.errors import CheckpointError, PluginError, UsageError
from kaminari_core.headers import TensorHeader, few
from kaminari_core.progress import silent
from kaminari_core.protocols import Model, Progress, Quantizer, ScaleSearch
from kaminari_core.quantization.linear import QuantizedLinear
from kaminari_core.quantization.manifest import FINGERPRINT, KEPT, METHOD, PARTS, SIDECAR, Manifest, Origin, Stored
from kaminari_core.quantization.scheme import Codes, Scheme, pack_nibbles
from kaminari_core.quantization.selection import Target, networks, targets
from kaminari_core.quantization.source import SourceCheckpoint, free_bytes
from kaminari_core.quantization.streams import StreamWriter, as_bytes, chunks, read_rows, row_ranges
from kaminari_core.specs import ModelSpec

DEFAULT_GROUP = 64
_ROWS = 64
_MEASURED = 256
"""Inputs on which the error of an output is measured."""


@dataclass(frozen=True, slots=True)
class Order:
    """What is asked for: the quantizer's name and object, that of the head (None leaves it), the group size, the search."""

    name: str
    quantizer: Quantizer
    head: Quantizer | None
    group: int
    search: ScaleSearch


@dataclass(frozen=True, slots=True)
class Job:
    """One weight to convert: its name, the tensor that it is read from, and how."""

    name: str
    of: str
    layer: str
    scheme: Scheme
    quantizer: Quantizer | None
    """None where the source has codes already."""


@dataclass(slots=True)
class Report:
    """What was done: the weights by name, layers that stay although they could be converted, with the reason, and sizes."""

    stored: dict[str, Stored] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    restored: list[str] = field(default_factory=list)
    kept: int = 0
    bytes_before: int = 0
    bytes_after: int = 0


def pack(
    spec: ModelSpec,
    source: SourceCheckpoint,
    out: Path,
    order: Order,
    seen: Mapping[str, Tensor],
    progress: Progress,
) -> Report:
    """Write the packed directory `out`, which must not exist. `seen` are the layers' inputs on calibration pages, or empty.

    Raises CheckpointError for a source that cannot be converted and UsageError where nothing of it can be, or where the disk is
    full. Whatever goes wrong, `out` is not there afterwards.
    """
    if out.exists():
        raise UsageError(f"{out} is there already; choose another --out, or remove it")
    out.parent.mkdir(parents=True, exist_ok=True)
    report = Report()
    jobs = plan(spec, source, order, report)
    needed = source.bytes
    if free_bytes(out.parent) < needed:
        raise UsageError(
            f"{out.parent} has {free_bytes(out.parent) / 1e9:.1f} GB free; up to {needed / 1e9:.1f} GB are needed"
        )
    with TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as name:
        partial = Path(name) / out.name
        partial.mkdir()
        _write(partial, source, jobs, order, seen, report, progress)
        _validate(spec, partial, jobs)
        partial.rename(out)
    report.bytes_before = source.bytes
    report.bytes_after = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    return report


def load_on_meta(spec: ModelSpec, directory: Path) -> Model:
    """A model without weights, with its draft head where there is one. Raises what loading raises."""
    load, device = spec.load(), torch.device("meta")
    try:
        model: Model = load(directory, EngineConfig(draft="mtp"), device, silent)
    except UsageError:
        model = load(directory, EngineConfig(), device, silent)
    return model


def plan(spec: ModelSpec, source: SourceCheckpoint, order: Order, report: Report) -> list[Job]:
    """The weights to convert, in the order in which they lie in the source; what stays is told in `report`."""
    with TemporaryDirectory() as name:
        view = source.directory
        if source.quantized:
            view = Path(name)
            source.write_hollow(view)
        model = load_on_meta(spec, view)
    jobs = [
        job for target in targets(model, heads=order.head is not None) for job in _jobs(target, source, order, report)
    ]
    if not jobs:
        raise UsageError(
            f"nothing of {source.directory} can be converted: {spec.name} names no linear layers that may be, or loads its "
            f"weights by other means than kaminari_core.weights{''.join(f'; {why}' for why in set(report.left.values()))}"
        )
    report.restored += sorted(set(source.quantized) - {job.name for job in jobs})
    return sorted(jobs, key=lambda job: _place(source, job))


def _jobs(target: Target, source: SourceCheckpoint, order: Order, report: Report) -> Iterator[Job]:
    for tensor in target.sources:
        quantizer = order.head if target.head else order.quantizer
        assert quantizer is not None, "heads are targets only where they are asked for"
        if tensor.of in source.quantized:
            yield Job(tensor.name, tensor.of, target.layer, source.quantized[tensor.of].scheme, None)
        elif source.format != "full" and not target.head:
            report.left[tensor.name] = f"it is in full precision in the {source.format} checkpoint"
        elif (scheme := Scheme(quantizer.bits, order.group).for_columns(target.columns)) is None:
            report.left[tensor.name] = f"its {target.columns} columns are no whole number of groups"
        else:
            yield Job(tensor.name, tensor.of, target.layer, scheme, quantizer)


def _place(source: SourceCheckpoint, job: Job) -> tuple[str, int]:
    header = source.full.get(job.of) or next(iter(source.quantized[job.of].headers.values()))
    return str(header.file), header.offset


def _write(
    directory: Path,
    source: SourceCheckpoint,
    jobs: Sequence[Job],
    order: Order,
    seen: Mapping[str, Tensor],
    report: Report,
    progress: Progress,
) -> None:
    # Other programs refuse it then, or warn at least, instead of filling in what they miss with random numbers.
    source.write_small_files(directory, {"quant_method": METHOD, "quantizer": order.name})
    converted = {job.name for job in jobs}
    kept = sorted(set(source.full) - converted)
    names = [f"{job.name}.{part}" for job in jobs for part in PARTS]
    digests: dict[str, tuple[TensorHeader, str]] = {}
    meter = _Meter(progress, source.bytes)
    restored = [source.quantized[name] for name in report.restored]
    with (
        StreamWriter(directory / KEPT, kept + report.restored) as pruned,
        StreamWriter(directory / SIDECAR, names) as sidecar,
    ):
        for name in kept:
            header = source.full[name]
            digests[name] = header, pruned.add(name, header.dtype, header.shape, meter.over(chunks(header)))
        for weight in restored:
            pruned.add_tensor(weight.name, weight.read().dequantize(torch.bfloat16))
        for job in jobs:
            writer = _Converter(source, job, order.search, seen.get(job.layer), digests, meter)
            report.stored[job.name] = writer.write(sidecar)
        origin = Origin(_fingerprint(digests), source.bytes, source.format)
        for file in (pruned, sidecar):
            file.finish({"format": "pt", FINGERPRINT: origin.fingerprint})
    report.kept = len(kept)
    found = {name: report.stored[name] for name in sorted(report.stored)}
    Manifest(order.name, order.search, __version__, origin, tuple(sorted(kept + report.restored)), found).write(
        directory
    )


class _Meter:
    """Tells the progress of all tensors together."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0

    def add(self, size: int) -> None:
        """So many bytes of the source are done."""
        self._done = min(self._total, self._done + size)
        self._progress("quantize", self._done, self._total)

    def over(self, pieces: Iterator[bytearray]) -> Iterator[bytearray]:
        """The pieces, counted as they pass."""
        for piece in pieces:
            yield piece
            self.add(len(piece))


class _Converter:
    """Converts one weight, a few rows at a time, and measures how far it is from the original."""

    def __init__(
        self,
        source: SourceCheckpoint,
        job: Job,
        search: ScaleSearch,
        seen: Tensor | None,
        digests: dict[str, tuple[TensorHeader, str]],
        meter: _Meter,
    ) -> None:
        self._source, self._job, self._seen = source, job, seen
        self._digests, self._meter = digests, meter
        # A layer that computed nothing on the calibration pages (a draft head's) is searched by plain squared error.
        self._search: ScaleSearch = "mse" if search == "activation" and seen is None else search
        self._scales: list[Tensor] = []
        self._zeros: list[Tensor] = []
        self._sums = torch.zeros(4, dtype=torch.float64)

    def write(self, sidecar: StreamWriter) -> Stored:
        """Write the three tensors into the sidecar."""
        job = self._job
        known = job.of in self._source.quantized
        shape = self._source.quantized[job.of].shape if known else self._source.full[job.of].shape
        rows, columns = shape
        width = columns // 2 if job.scheme.bits == 4 else columns
        sha256 = {}
        sha256["codes"] = sidecar.add(f"{job.name}.codes", "U8", (rows, width), self._pieces())
        sha256["scales"] = sidecar.add_tensor(f"{job.name}.scales", _narrowest(torch.cat(self._scales)))
        sha256["zeros"] = sidecar.add_tensor(f"{job.name}.zeros", torch.cat(self._zeros))
        error = None if known else _ratio(self._sums[0], self._sums[1])
        output = None if known or self._seen is None else _ratio(self._sums[2], self._sums[3])
        return Stored((rows, columns), job.scheme.bits, job.scheme.group, sha256, error, output)

    def _pieces(self) -> Iterator[memoryview]:
        """The bytes of the codes; scales and zero points are kept for later, as the file has them behind."""
        for codes in self._repacked() if self._job.of in self._source.quantized else self._quantized():
            self._scales.append(codes.scales)
            self._zeros.append(codes.zeros)
            yield as_bytes(pack_nibbles(codes.codes) if self._job.scheme.bits == 4 else codes.codes)

    def _repacked(self) -> Iterator[Codes]:
        weight = self._source.quantized[self._job.of]
        for part, header in weight.headers.items():
            digest = hashlib.sha256()
            for piece in self._meter.over(chunks(header)):
                digest.update(piece)
            self._digests[f"{self._job.of}:{part}"] = header, digest.hexdigest()
        yield weight.read()

    def _quantized(self) -> Iterator[Codes]:
        job, header = self._job, self._source.full[self._job.of]
        digest = hashlib.sha256()
        for start, stop in row_ranges(header.shape[0], 4 * header.shape[1], _ROWS):
            rows = read_rows(header, start, stop)
            digest.update(as_bytes(rows))
            weight = rows.to(torch.float32)
            if not bool(weight.isfinite().all()):
                raise CheckpointError(f"{job.of} of {self._source.directory} holds numbers that are not finite")
            inputs = self._seen.to(torch.float32) if self._seen is not None and self._search == "activation" else None
            assert job.quantizer is not None, "weights in full precision are quantized"
            codes = job.quantizer.quantize(weight, job.scheme, self._search, inputs)
            _check_codes(job, codes, weight)
            self._measure(weight, codes)
            yield codes
            if job.of == job.name:
                self._meter.add(rows.nbytes)
        self._digests[job.of] = header, digest.hexdigest()

    def _measure(self, weight: Tensor, codes: Codes) -> None:
        wrong = codes.dequantize() - weight
        sums = [wrong.square().sum(), weight.square().sum()]
        if self._seen is not None:
            seen = self._seen[:_MEASURED].to(torch.float32)
            sums += [(seen @ wrong.T).square().sum(), (seen @ weight.T).square().sum()]
        self._sums[: len(sums)] += torch.stack(sums).double()


def _check_codes(job: Job, codes: Codes, weight: Tensor) -> None:
    """Raise PluginError for what a quantizer must not return."""
    largest = max(int(codes.codes.max()), int(codes.zeros.max()))
    scales = bool((codes.scales.isfinite() & (codes.scales > 0)).all())
    if (
        codes.codes.shape != weight.shape
        or codes.group != job.scheme.group
        or largest > job.scheme.levels
        or not scales
    ):
        raise PluginError(
            f"the quantizer returned for {job.name} codes {list(codes.codes.shape)} up to {largest} in groups of {codes.group}, "
            f"with scales {'finite and positive' if scales else 'not all finite and positive'}; wanted were "
            f"{list(weight.shape)} up to {job.scheme.levels} in groups of {job.scheme.group}"
        )


def _narrowest(scales: Tensor) -> Tensor:
    """The same numbers in the smallest of the three types that holds them exactly."""
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(scales.to(dtype).to(torch.float32), scales):
            return scales.to(dtype)
    return scales


def _ratio(wrong: Tensor, whole: Tensor) -> float:
    return float((wrong / whole.clamp(min=1e-300)).sqrt())


def _fingerprint(digests: Mapping[str, tuple[TensorHeader, str]]) -> str:
    whole = hashlib.sha256()
    for name in sorted(digests):
        header, digest = digests[name]
        whole.update(f"{name} {header.dtype} {list(header.shape)} {digest}\n".encode())
    return whole.hexdigest()


def _validate(spec: ModelSpec, directory: Path, jobs: Sequence[Job]) -> None:
    """Raise CheckpointError unless the model's package takes the directory, with just these layers converted."""
    found = networks(load_on_meta(spec, directory)).values()
    layers = {name: module for network in found for name, module in network.named_modules(remove_duplicate=False)}
    wanted = {job.layer: layers.get(job.layer) for job in jobs}
    # A draft head may share the layer of the head, which is then there under two names.
    swapped = {name for name, module in layers.items() if isinstance(module, QuantizedLinear)}
    wrong = {name for name, module in wanted.items() if not isinstance(module, QuantizedLinear)}
    wrong |= {name for name in swapped if not any(layers[name] is module for module in wanted.values())}
    if wrong:
        raise CheckpointError(
            f"the packed checkpoint converts other layers than were chosen: {few(sorted(wrong))}; nothing was kept"
        )
