"""Engine settings: one frozen value, read by everything, changed by nobody, with no effect of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from kaminari_core.errors import UsageError

Sizing = Literal["bucket", "exact"]
CompileVision = Literal["auto", "on", "off"]
Draft = Literal["none", "prompt-lookup", "mtp"]
Kernels = Literal["auto", "own", "aten", "plain"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How an engine is built. Command-line flags have the same names with dashes."""

    device: str = "auto"
    """`auto` (CUDA when there is a card, else CPU), `cpu`, `cuda` or `cuda:N`."""
    dtype: str = "auto"
    """`auto` (bfloat16 on CUDA; on a CPU float32 for checkpoints below 1 GiB, else bfloat16) or the one to compute in."""
    slots: int = 4
    """How many requests are decoded together at most."""
    max_length: int = 4096
    """Cache positions of one slot: prompt and reply of one request together."""
    max_tokens: int = 1024
    """Generated tokens of one reply when the request names no limit."""
    compile: bool = True
    """Compile the decode step; off runs the same code eagerly."""
    compile_vision: CompileVision = "auto"
    """`auto` compiles the parts of the vision tower that `kaminari compile --report` found to win on this machine, `on` its
    blocks, `off` none."""
    cache: str = "static"
    """The KV cache, by the name that a plugin gives it."""
    scheduler: str = "continuous"
    """The admission policy, by the name that a plugin gives it."""
    batch_window: float = 0.05
    """Seconds that the scheduler `microbatch` waits after a first arrival for others to join its batch."""
    quantizer: str = "auto"
    """`auto` (what the checkpoint directory is), `none`, or the quantizer that it must have been packed with."""
    kernels: Kernels = "auto"
    """What a CPU computes with: `own` (this package's, compiled on first use), `aten` (torch's), `plain` (torch's without its
    packed layouts), or `auto`: own where they serve, else aten."""
    activation_bits: int = 8
    """Own kernels round activations to so many bits where weights are quantized: 8, or 16, which is as good as not at all."""
    sizing: Sizing = "bucket"
    """`bucket` letterboxes onto a small set of canvases; `exact` is the reference processor's resize."""
    visual_tokens: int = 512
    """The most visual tokens one picture may take, in both sizing policies."""
    page_tokens: int = 0
    """Visual tokens of the largest picture that is planned for: a larger one is refused instead of shrunk. 0 is no such limit."""
    max_images: int = 16
    """Pictures of one request."""
    max_image_pixels: int = 64_000_000
    """Pixels of one encoded picture, read from its header before it is decoded."""
    max_request_pixels: int = 128_000_000
    """Pixels of all pictures of one request together."""
    queue: int = 256
    """Requests that may wait; one more is refused."""
    prepare_threads: int = 2
    """Worker threads that decode pictures and tokenize."""
    prefill_chunk: int = 512
    """Prompt tokens that run through the decoder at once."""
    draft: Draft = "none"
    """Speculative decoding: `prompt-lookup` guesses from the row's own text, `mtp` with the model's draft head, `none` is off."""
    draft_tokens: int = 3
    """Tokens that are guessed at a time."""
    draft_auto: bool = True
    """Pause guessing at numbers of rows where it is measured to lose."""
    loop_guard: bool = True
    """End a reply of a reading task (`ocr`, `table` and the like) that repeats itself; a request can say otherwise."""
    calibration: str = "auto"
    """Makes confidences probabilities: a file that `kaminari eval --calibrate` wrote, `none`, or `auto` (the checkpoint's
    calibration.json, if it has one)."""
    plan: bool = True
    """Plan the memory before anything is loaded, and do not start with what cannot fit."""
    auto: bool = False
    """Start with fewer slots, a shorter length or a smaller largest page where what was asked for does not fit."""
    vram: str = "auto"
    """The memory to plan for, such as 6g or 6144m; `auto` is what is free on the device."""
    stall_seconds: float = 180.0
    """An engine that has work and makes no step for this long has stalled. The first steps compile, unless warmed up."""

    def __post_init__(self) -> None:
        positive = ("slots", "max_length", "max_tokens", "visual_tokens", "max_images", "max_image_pixels",
                    "max_request_pixels", "queue", "prepare_threads", "prefill_chunk", "draft_tokens")  # fmt: skip
        for name in positive:
            if getattr(self, name) < 1:
                raise UsageError(f"{name.replace('_', '-')} is {getattr(self, name)}, but must be at least 1")
        if self.page_tokens < 0:
            raise UsageError(f"page-tokens is {self.page_tokens}, but must be 0 or more")
        if not 0 <= self.batch_window < math.inf:
            raise UsageError(f"batch-window is {self.batch_window}, but must be a number of seconds, 0 or more")
        if not 0 < self.stall_seconds < math.inf:
            raise UsageError(f"stall-seconds is {self.stall_seconds}, but must be a number of seconds above 0")
        if self.compile_vision not in ("auto", "on", "off"):
            raise UsageError(f"compile-vision is {self.compile_vision!r}; choose auto, on or off")
        if self.kernels not in ("auto", "own", "aten", "plain"):
            raise UsageError(f"kernels is {self.kernels!r}; choose auto, own, aten or plain")
        if self.activation_bits not in (8, 16):
            raise UsageError(f"activation-bits is {self.activation_bits}; choose 8 or 16")
        if self.sizing not in ("bucket", "exact"):
            raise UsageError(f"sizing is {self.sizing!r}; choose bucket or exact")
        if self.draft not in ("none", "prompt-lookup", "mtp"):
            raise UsageError(f"draft is {self.draft!r}; choose none, prompt-lookup or mtp")
