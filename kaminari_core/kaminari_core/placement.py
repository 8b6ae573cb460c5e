"""Where and in what precision a model is computed: what `auto` means on this machine for this checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kaminari_core.errors import UsageError
from kaminari_core.quantization.manifest import is_packed, read_manifest

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "bfloat16", "float16")
FLOAT32_BELOW = 1 << 30
"""On a CPU, checkpoints smaller than this many bytes are computed in float32 unless told otherwise."""


def checkpoint_bytes(folder: Path) -> int:
    """Size of the weight files of a checkpoint directory, or of those that a packed one was made from."""
    if is_packed(folder):
        return read_manifest(folder).source.bytes
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def resolve_device(name: str) -> torch.device:
    """The device that `auto`, `cpu`, `cuda` or `cuda:N` means here. Raises UsageError when there is no such card."""
    import torch

    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"device is {name!r}; choose auto, cpu, cuda or cuda:N")
    if device.type == "cpu":
        return torch.device("cpu")
    if torch.version.cuda is None:
        raise UsageError(
            f"device is {name!r}, but this PyTorch ({torch.__version__}) is built without CUDA; use --device cpu"
        )
    count = torch.cuda.device_count()
    if count == 0:
        raise UsageError(
            f"device is {name!r}, but PyTorch sees no card: check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES"
        )
    index = device.index or 0
    if index >= count:
        raise UsageError(f"device is {name!r}, but there are {count} cards, counted from cuda:0")
    return torch.device("cuda", index)


def resolve_dtype(name: str, device: torch.device, checkpoint: Path) -> torch.dtype:
    """The dtype to compute in. `auto` is bfloat16, or float32 on a CPU for checkpoints smaller than `FLOAT32_BELOW`."""
    import torch

    dtype: torch.dtype = getattr(torch, dtype_name(name, device.type, checkpoint_bytes(checkpoint)))
    return dtype


def dtype_name(name: str, device: str, size: int) -> str:
    """The name of the dtype to compute in, on a kind of device, for weight files of `size` bytes. Raises UsageError."""
    if name in DTYPES:
        return name
    if name != "auto":
        raise UsageError(f"dtype is {name!r}; choose auto, {', '.join(DTYPES)}")
    return "float32" if device == "cpu" and size < FLOAT32_BELOW else "bfloat16"
