"""Where and in what precision a model is computed: what `auto` means on this machine for this checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch

from kaminari_core.errors import UsageError

FLOAT32_BELOW = 1 << 30
"""On a CPU, checkpoints smaller than this many bytes are computed in float32 unless told otherwise."""


def checkpoint_bytes(folder: Path) -> int:
    """Size of the weight files of a checkpoint directory."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def resolve_device(name: str) -> torch.device:
    """The device that `auto`, `cpu`, `cuda` or `cuda:N` means here. Raises UsageError when there is no such card."""
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
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name in dtypes:
        return dtypes[name]
    if name != "auto":
        raise UsageError(f"dtype is {name!r}; choose auto, {', '.join(dtypes)}")
    small = checkpoint_bytes(checkpoint) < FLOAT32_BELOW
    return torch.float32 if device.type == "cpu" and small else torch.bfloat16
