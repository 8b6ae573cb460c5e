"""Qwen3-VL: a pre-norm decoder with norms on queries and keys, interleaved M-RoPE and deepstack; dense or mixture of experts.

The shared parts (attention over the slot cache, the loop of layers) are the core's; what stands here is what makes it this model.
In every model package the files of this name can be read side by side.

Letters in shapes: N tokens, S prompt positions, R rows, W new tokens of a row, H hidden size, E experts, A active experts,
I expert intermediate size, D head size, V vocabulary, and K, T, slots as in `kaminari_core.layers`.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kaminari_core.config import EngineConfig
from kaminari_core.errors import CheckpointError
from kaminari_core.flow import Embedded, Prepared, Request
from kaminari_core.layers import Attention, Decoder, GatedMLP, RMSNorm
from kaminari_core.placement import resolve_dtype
from kaminari_core.protocols import Cache, Detokenizer, LayerCall, ModelShape, Progress, Step
from kaminari_core.rope import half_split_table, interleaved_axes, inverse_frequencies, rotate_half_split
from kaminari_core.weights import load_weights
from kaminari_qwen3vl.config import Config, ExpertsConfig, TextConfig, read_config
from kaminari_qwen3vl.processor import Processor
from kaminari_qwen3vl.vision import VisionTower
from kaminari_qwen3vl.weights import TIES, rules


class Experts(nn.Module):
    """Gated MLPs of which each token uses the few that a router picks (Qwen3-VL-30B-A3B)."""

    def __init__(self, hidden: int, config: ExpertsConfig) -> None:
        super().__init__()
        self.active = config.active
        self.router = nn.Linear(hidden, config.count, bias=False)
        self.gate_up_proj = nn.Parameter(torch.empty(config.count, 2 * config.intermediate, hidden))
        self.down_proj = nn.Parameter(torch.empty(config.count, hidden, config.intermediate))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The weights and the indexes, both (N, A), of each token's experts: softmax over all, the best A, renormalized."""
        logits = self.router(x)
        weights, chosen = torch.softmax(logits, dim=-1, dtype=torch.float32).topk(self.active, dim=-1)
        return (weights / weights.sum(dim=-1, keepdim=True)).to(logits.dtype), chosen

    def prefill(self, x: Tensor) -> Tensor:
        """(N, H) to (N, H), one expert at a time over the tokens that chose it; waits for the device to know which."""
        weights, chosen = self.route(x)
        out = torch.zeros_like(x)
        for expert in sorted(set(chosen.flatten().tolist())):
            token, choice = torch.where(chosen == expert)
            gate, up = F.linear(x[token], self.gate_up_proj[expert]).chunk(2, dim=-1)
            part = F.linear(F.silu(gate) * up, self.down_proj[expert])
            out.index_add_(0, token, part * weights[token, choice, None])
        return out

    def decode(self, x: Tensor) -> Tensor:
        """(R, W, H) to (R, W, H) with shapes that do not depend on the choice: each token's experts are gathered."""
        weights, chosen = self.route(x.flatten(0, 1))
        gate_up = torch.einsum("naih,nh->nai", self.gate_up_proj[chosen], x.flatten(0, 1))
        gate, up = gate_up.chunk(2, dim=-1)
        parts = torch.einsum("nahi,nai->nah", self.down_proj[chosen], F.silu(gate) * up)
        return (parts * weights[..., None]).sum(1).view_as(x)


class DenseMLP(GatedMLP):
    """The dense MLP, with the two calls of `Experts`."""

    def prefill(self, x: Tensor) -> Tensor:
        """(N, H) to (N, H)."""
        return self.forward(x)

    def decode(self, x: Tensor) -> Tensor:
        """(R, W, H) to (R, W, H)."""
        return self.forward(x)


class Block(nn.Module):
    """One decoder layer: norm, attention, add; norm, MLP or experts, add."""

    def __init__(self, config: TextConfig, index: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden, config.norm_eps)
        self.attention = Attention(
            config.hidden, config.heads, config.kv_heads, config.head_dim, rotate_half_split, norm_eps=config.norm_eps
        )
        self.post_attention_layernorm = RMSNorm(config.hidden, config.norm_eps)
        self.mlp: Experts | DenseMLP
        if config.experts is not None and index in config.experts.layers:
            self.mlp = Experts(config.hidden, config.experts)
        else:
            self.mlp = DenseMLP(config.hidden, config.intermediate)

    def prefill(self, hidden: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
        """Prompt positions [start, start + S) of one slot; see `kaminari_core.layers.Attention.prefill`."""
        attended = self.attention.prefill(self.input_layernorm(hidden), cos, sin, keys, values, start)
        hidden = hidden + attended
        return hidden + self.mlp.prefill(self.post_attention_layernorm(hidden))

    def decode(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, cursors: Tensor, mask: Tensor
    ) -> Tensor:
        """One step for all rows; see `kaminari_core.layers.Attention.decode`."""
        attended = self.attention.decode(self.input_layernorm(hidden), cos, sin, keys, values, cursors, mask)
        hidden = hidden + attended
        return hidden + self.mlp.decode(self.post_attention_layernorm(hidden))


class Network(nn.Module):
    """The two towers that a checkpoint's tensors fill."""

    def __init__(self, config: Config, device: torch.device) -> None:
        super().__init__()
        text = config.text
        self.decoder = Decoder(
            [Block(text, index) for index in range(text.layers)],
            vocabulary=text.vocabulary,
            hidden=text.hidden,
            norm_eps=text.norm_eps,
            axes=interleaved_axes(text.sections),
            table=half_split_table,
            group=text.heads // text.kv_heads,
        )
        self.vision = VisionTower(config.vision, device)


class Qwen3VL:
    """A loaded Qwen3-VL: `kaminari_core.protocols.Model`."""

    def __init__(self, config: Config, network: Network, processor: Processor) -> None:
        text, pictures = config.text, config.pictures
        embedding = network.decoder.embed_tokens.weight
        self.device, self.dtype = embedding.device, embedding.dtype
        self.sampling_defaults = config.sampling
        self.shape = ModelShape(
            layers=text.layers,
            hidden=text.hidden,
            heads=text.heads,
            kv_heads=text.kv_heads,
            head_dim=text.head_dim,
            vocabulary=text.vocabulary,
            max_positions=text.max_positions,
            end_tokens=config.end_tokens,
            image_unit=pictures.unit,
            min_visual_tokens=pictures.min_tokens,
        )
        self.network = network
        self._processor = processor
        self._image_token = config.image_token

    def prepare(self, request: Request) -> Prepared:
        """Check a request and turn it into model inputs. Raises RequestError with the `param` at fault."""
        return self._processor.prepare(request)

    @torch.inference_mode()
    def embed(self, prepared: Prepared) -> Embedded:
        """Embed the prompt, with each picture's features in the places of its image tokens.

        Deepstack feature k is added to the hidden state right after decoder layer k, at image tokens only.
        """
        tokens = torch.tensor(prepared.tokens, device=self.device)
        hidden = self.network.decoder.embed_tokens(tokens)
        positions = prepared.positions.to(self.device)
        if not prepared.patches:
            return Embedded(hidden, positions)
        # One picture at a time: attention does not cross pictures, and the peak is that of the largest one.
        seen = [self.network.vision(patches) for patches in prepared.patches]
        at = tokens == self._image_token
        hidden[at] = torch.cat([features for features, _ in seen]).to(hidden.dtype)
        after_layer = {}
        for layer, parts in enumerate(zip(*(deepstack for _, deepstack in seen), strict=True)):
            after_layer[layer] = torch.zeros_like(hidden)
            after_layer[layer][at] = torch.cat(parts).to(hidden.dtype)
        return Embedded(hidden, positions, after_layer)

    @torch.inference_mode()
    def prefill(self, embedded: Embedded, start: int, stop: int, cache: Cache, slot: int) -> Tensor:
        """Run prompt positions [start, stop) of one slot; returns the logits (V,) of the last of them."""
        return self.network.decoder.prefill(embedded, start, stop, cache, slot)

    def decode(self, step: Step, cache: Cache, layer_call: LayerCall) -> Tensor:
        """Run one step for all rows; returns the logits (R, W, V)."""
        return self.network.decoder.decode(step, cache, layer_call)

    def detokenizer(self) -> Detokenizer:
        """A fresh detokenizer for one reply."""
        return self._processor.detokenizer()


def load(checkpoint: Path, config: EngineConfig, device: torch.device, progress: Progress) -> Qwen3VL:
    """Load a checkpoint directory. Raises CheckpointError for anything in it that is missing, damaged or not supported."""
    found = read_config(checkpoint)
    if found.vision.out_hidden != found.text.hidden:
        raise CheckpointError(
            f"config.json of {checkpoint} joins a vision tower of output {found.vision.out_hidden} to a decoder of "
            f"hidden size {found.text.hidden}"
        )
    processor = Processor(checkpoint, found, config)
    dtype = resolve_dtype(config.dtype, device, checkpoint)
    with torch.device("meta"):
        network = Network(found, device)
    ties = TIES if found.text.tied else {}
    load_weights(
        network,
        checkpoint,
        rules(found),
        device=device,
        dtype=dtype,
        ties=ties,
        layout=config.kernels,
        progress=progress,
    )
    network.eval()
    frequencies = inverse_frequencies(found.text.head_dim, found.text.rope_theta).to(device)
    positions = min(config.max_length, found.text.max_positions)
    network.decoder.set_rotary(frequencies, positions, dtype)
    return Qwen3VL(found, network, processor)
