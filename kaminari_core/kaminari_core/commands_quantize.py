"""`kaminari quantize`: make a packed checkpoint directory, once, ahead of serving it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kaminari_core.checkpoint import resolve
from kaminari_core.config import EngineConfig
from kaminari_core.errors import UsageError
from kaminari_core.options import model_options, option
from kaminari_core.progress import terminal_progress
from kaminari_core.registry import Registry
from kaminari_core.specs import ModelSpec

if TYPE_CHECKING:
    from torch import Tensor

    from kaminari_core.protocols import Progress
    from kaminari_core.quantization.packing import Order, Report
    from kaminari_core.quantization.source import SourceCheckpoint

SEARCHES = ("rtn", "mse", "activation")


@click.command()
@model_options
@option("--quantizer", required=True, metavar="NAME", help="`int4`, `int8` or one that a plugin brings.")
@option("--out", required=True, metavar="DIR", help="The directory to make, for --checkpoint.")
@option(
    "--group",
    type=click.Choice(("32", "64", "128")),
    help="Weights that share a scale; 64 unless given, 32 where that fits not.",
)
@option(
    "--head",
    type=click.Choice(("none", "int8", "int4")),
    default="none",
    show_default=True,
    help="Convert the output layer as well; the embedding table stays as it is, even when the two are one.",
)
@option(
    "--scale",
    type=click.Choice(SEARCHES),
    help="How scales are chosen: `rtn` rounds to nearest, `mse` searches for the least squared error, `activation` weighs it "
    "by what --calibrate shows. Default: `mse`, with --calibrate `activation`.",
)
@option(
    "--calibrate", metavar="DIR", help="Pictures of pages that the model reads to see how large its activations are."
)
@option("--device", default="auto", show_default=True, help="Where the pages are read.")
@option("--json", "as_json", is_flag=True, help="Print one JSON object, with the error of every layer.")
@click.pass_obj
def quantize(
    registry: Registry,
    /,
    model: str,
    checkpoint: str | None,
    quantizer: str,
    out: str,
    group: str | None,
    head: str,
    scale: str | None,
    calibrate: str | None,
    device: str,
    as_json: bool,
) -> None:
    """Pack a checkpoint: the language model's attention and MLP weights as 4- or 8-bit codes.

    Vision tower, embeddings, norms and, unless --head says otherwise, the output layer stay as they are, byte for byte. The
    result is a directory that --checkpoint takes. A GPTQ, AWQ or compressed-tensors checkpoint of the model is repacked exactly.
    """
    from kaminari_core.quantization.packing import pack
    from kaminari_core.quantization.source import open_source

    spec, folder = resolve(registry, model, checkpoint)
    source = open_source(folder)
    order = _order(registry, source, quantizer, head, group, scale, calibrate)
    with terminal_progress() as progress:
        seen = _seen(spec, folder, calibrate, device, progress) if calibrate else {}
        report = pack(spec, source, Path(out), order, seen, progress)
    click.echo(json.dumps(_facts(order, report), indent=1) if as_json else describe(spec, Path(out), order, report))


def _order(
    registry: Registry,
    source: SourceCheckpoint,
    quantizer: str,
    head: str,
    group: str | None,
    scale: str | None,
    calibrate: str | None,
) -> Order:
    from kaminari_core.quantization.packing import DEFAULT_GROUP, Order

    chosen = registry.quantizer(quantizer).load()()
    if source.quantized:
        bits = {weight.scheme.bits for weight in source.quantized.values()}
        if bits != {chosen.bits}:
            raise UsageError(
                f"{source.directory} holds {source.format} weights of {max(bits)} bits, which are kept: use --quantizer "
                f"int{max(bits)}"
            )
        if given := [
            flag for flag, value in (("--group", group), ("--scale", scale), ("--calibrate", calibrate)) if value
        ]:
            raise UsageError(
                f"{source.directory} is quantized already ({source.format}), and its codes are repacked as they are: leave out "
                f"{', '.join(given)}"
            )
    search: Any = scale or ("activation" if calibrate else "mse")
    if search == "activation" and not calibrate:
        raise UsageError("--scale activation needs pages to look at: give a directory of pictures with --calibrate")
    heads = None if head == "none" else registry.quantizer(head).load()()
    return Order(quantizer, chosen, heads, int(group) if group else DEFAULT_GROUP, search)


def _seen(spec: ModelSpec, folder: Path, calibrate: str, device: str, progress: Progress) -> dict[str, Tensor]:
    from kaminari_core.quantization.calibration import calibrate as look
    from kaminari_core.quantization.calibration import calibration_pages

    return look(spec, folder, calibration_pages(Path(calibrate)), EngineConfig(device=device, compile=False), progress)


def describe(spec: ModelSpec, out: Path, order: Order, report: Report) -> str:
    """The report as text: one line for each kind of layer, what stays, sizes, and what to do next."""
    lines = [f"{'layers':<42} {'count':>5} {'bits':>4} {'group':>5} {'weight error':>20} {'output error':>20}"]
    kinds: dict[tuple[str, int, int], list[str]] = {}
    for name, stored in report.stored.items():
        kinds.setdefault((_kind(name), stored.bits, stored.group), []).append(name)
    for (kind, bits, group), names in kinds.items():
        errors = [report.stored[name].error for name in names]
        outputs = [report.stored[name].output_error for name in names]
        lines.append(f"{kind:<42} {len(names):>5} {bits:>4} {group:>5} {_range(errors):>20} {_range(outputs):>20}")
    lines += [f"stays: {name} ({why})" for name, why in report.left.items()]
    if report.restored:
        lines.append(f"made full again, as the model cannot use them quantized: {len(report.restored)} weights")
    lines.append(
        f"{len(report.stored)} weights converted, {report.kept} tensors kept as they are: {report.bytes_before / 1e6:,.1f} MB "
        f"became {report.bytes_after / 1e6:,.1f} MB"
    )
    lines.append(f"{out} is ready: kaminari run --model {spec.name} --checkpoint {out} ...")
    return "\n".join(lines)


def _facts(order: Order, report: Report) -> dict[str, Any]:
    return {
        "quantizer": order.name,
        "scale": order.search,
        "bytes_before": report.bytes_before,
        "bytes_after": report.bytes_after,
        "kept": report.kept,
        "left": report.left,
        "restored": report.restored,
        "layers": {
            name: {
                "shape": list(stored.shape),
                "bits": stored.bits,
                "group": stored.group,
                "error": stored.error,
                "output_error": stored.output_error,
            }
            for name, stored in report.stored.items()
        },
    }


def _kind(name: str) -> str:
    """A layer's name without the number of its block."""
    return ".".join("*" if part.isdecimal() else part for part in name.removesuffix(".weight").split("."))


def _range(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    return f"{sum(known) / len(known):.2%} (to {max(known):.2%})"
