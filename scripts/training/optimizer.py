"""Muon for the weight matrices, AdamW for everything else, over two processes that share the work.

Muon replaces a matrix's momentum by the nearest orthogonal matrix (Jordan et al., 2024; the coefficients of the
Newton-Schulz iteration are theirs). Each process orthogonalises its share of the matrices; the updates are then summed.
"""

from __future__ import annotations

from collections import defaultdict

import torch
import torch.distributed as distributed
from torch import Tensor, nn


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """Bring the singular values of matrices (count, rows, columns) close to one."""
    tall = matrices.shape[1] > matrices.shape[2]
    result = matrices.transpose(1, 2) if tall else matrices
    result = (result / (result.norm(dim=(1, 2), keepdim=True) + 1e-7)).bfloat16()
    for _ in range(steps):
        gram = result @ result.transpose(1, 2)
        result = 3.4445 * result + (-4.7750 * gram + 2.0315 * (gram @ gram)) @ result
    result = result.float()
    return torch.transpose(result, 1, 2) if tall else result


def _pieces(name: str, tensor: Tensor) -> list[Tensor]:
    """Split a fused or very wide matrix into the matrices that are orthogonalised on their own."""
    if name.endswith("qkv.weight"):
        return list(tensor.chunk(3))
    if tensor.shape[0] >= 512:
        return list(torch.split(tensor, 128))
    return [tensor]


class Optimizer:
    """One update of all weights per step; `scale` multiplies both learning rates."""

    def __init__(self, module: nn.Module, muon_rate: float, adam_rate: float, decay: float = 0.02) -> None:
        self.named = [(name, weight) for name, weight in module.named_parameters() if weight.requires_grad]
        self.muon_rate = muon_rate
        self.decay = decay
        self.matrices = [
            (name, weight)
            for name, weight in self.named
            if weight.ndim == 2 and any(part in name for part in ("blocks", "layers", "merger", "draft"))
        ]
        chosen = {name for name, _ in self.matrices}
        others = [weight for name, weight in self.named if name not in chosen]
        self.adam = torch.optim.AdamW(others, lr=adam_rate, betas=(0.9, 0.98), weight_decay=0.0, foreach=True)
        self.adam_rate = adam_rate
        self.momentum = [torch.zeros_like(weight) for _, weight in self.matrices]
        self.rank = distributed.get_rank() if distributed.is_initialized() else 0
        self.world = distributed.get_world_size() if distributed.is_initialized() else 1

    def share_gradients(self) -> float:
        """Average the gradients over the processes, clip them to norm one, give the norm before.

        Weights without a gradient must be the same ones in all processes; `step` leaves them as they are.
        """
        active = [weight for _, weight in self.named if weight.grad is not None]
        flat = torch.cat([weight.grad.flatten() for weight in active if weight.grad is not None])
        if self.world > 1:
            distributed.all_reduce(flat)
            flat /= self.world
        norm = float(flat.norm())
        flat *= min(1.0, 1.0 / (norm + 1e-6))
        for weight, piece in zip(active, torch.split(flat, [weight.numel() for weight in active]), strict=True):
            weight.grad = piece.view_as(weight)
        return norm

    def step(self, scale: float) -> None:
        """Update the weights."""
        for group in self.adam.param_groups:
            group["lr"] = self.adam_rate * scale
        self.adam.step()
        shaped: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = defaultdict(list)
        active = [
            (named, momentum)
            for named, momentum in zip(self.matrices, self.momentum, strict=True)
            if named[1].grad is not None
        ]
        if not active:
            return
        updates = [torch.zeros_like(weight) for (_, weight), _ in active]
        for ((name, weight), momentum), update in zip(active, updates, strict=True):
            assert weight.grad is not None
            momentum.lerp_(weight.grad, 0.05)
            nesterov = weight.grad.lerp(momentum, 0.95)
            for source, target in zip(_pieces(name, nesterov), _pieces(name, update), strict=True):
                shaped[tuple(source.shape)].append((source, target))
        for shape, pairs in shaped.items():
            mine = pairs[self.rank :: self.world]
            if mine:
                whole = orthogonalise(torch.stack([source for source, _ in mine]))
                for (_, target), matrix in zip(mine, whole * max(1.0, shape[0] / shape[1]) ** 0.5, strict=True):
                    target.copy_(matrix)
        if self.world > 1:
            flat = torch.cat([update.flatten() for update in updates])
            distributed.all_reduce(flat)
            updates = [
                piece.view_as(update)
                for piece, update in zip(
                    torch.split(flat, [update.numel() for update in updates]), updates, strict=True
                )
            ]
        rate = self.muon_rate * scale
        with torch.no_grad():
            for ((_, weight), _), update in zip(active, updates, strict=True):
                weight.mul_(1 - rate * self.decay).add_(update, alpha=-rate)

    def state(self) -> dict[str, object]:
        """Give what a later run needs to carry on."""
        return {"adam": self.adam.state_dict(), "momentum": self.momentum}

    def load_state(self, saved: dict[str, object]) -> None:
        """Take over an earlier run's state."""
        self.adam.load_state_dict(saved["adam"])  # type: ignore[arg-type]
        self.momentum = saved["momentum"]  # type: ignore[assignment]
