"""Decode steps of a small decoder in the kernels that an executor launches; each step uses the buffers of the last."""

from collections.abc import Callable

import torch
from pagewise_kernels.attention import DecodePlan, decode_attention
from pagewise_kernels.decode_inputs import decode_inputs
from pagewise_kernels.kv_layer import KVLayer
from pagewise_kernels.rms_norm import rms_norm
from pagewise_kernels.rope_write_kv import rope_write_kv
from pagewise_kernels.sampling import SamplingTensors, sample
from pagewise_kernels.silu_mul import silu_mul
from pagewise_kernels.skinny_linear import skinny_linear

BLOCK_SIZE = 4


class DecodeSteps:
    """Sequences that decode; ``real``: in sizes that fill a GPU for some microseconds. Random, by a seed.

    ``multiply``: computes x · weightᵀ.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        real: bool,
        most_steps: int,
        multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.nn.functional.linear,
    ) -> None:
        self._multiply, self._device = multiply, device
        hidden, self._heads, self._kv_heads, self._dim, inner, vocab = (
            (1024, 8, 2, 128, 2816, 32_000) if real else (32, 4, 2, 16, 48, 300)
        )
        layers, batch, context = (4, 16, 300) if real else (2, 3, 20)
        generator = torch.Generator().manual_seed(5)

        def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(shape, generator=generator) * scale).to(device, torch.bfloat16)

        def linear(size_out: int, size_in: int) -> torch.Tensor:
            return random(size_out, size_in, scale=size_in**-0.5)

        size, kv_size = self._heads * self._dim, self._kv_heads * self._dim
        self._layers = [
            (
                random(hidden), linear(size + 2 * kv_size, hidden), linear(hidden, size),
                random(hidden), linear(2 * inner, hidden), linear(hidden, inner),
            )
            for _ in range(layers)
        ]  # fmt: skip
        self._embedding, self._norm, self._head = random(vocab, hidden), random(hidden), linear(vocab, hidden)
        blocks = -(-(context + most_steps) // BLOCK_SIZE)
        self.keys, self.values = (
            random(layers, batch * blocks, BLOCK_SIZE, self._kv_heads, self._dim) for _ in range(2)
        )
        self._tables = torch.randperm(batch * blocks, generator=generator).to(device, torch.int32).view(batch, blocks)
        angles = torch.rand(blocks * BLOCK_SIZE, self._dim // 2, generator=generator).to(device)
        self._cos, self._sin = angles.cos().bfloat16(), angles.sin().bfloat16()
        self._lengths = (torch.arange(batch, dtype=torch.int32) * 7 % context + 1).to(device)
        self._rows = torch.arange(batch, dtype=torch.int32).to(device)
        self._last_tokens = torch.arange(3, 3 + batch).to(device)
        self._ids, self._positions, self._slots = torch.zeros(3, batch, dtype=torch.int64).to(device)
        self._plan = DecodePlan(
            max_queries=batch, heads=self._heads, kv_heads=self._kv_heads, head_dim=self._dim, kv_dtype=torch.bfloat16,
            device=device,
        )  # fmt: skip
        floats = torch.ones(batch).to(device)
        self._sampling = SamplingTensors(
            floats * 0.8, (self._rows * 0 + 50), floats * 0.9, floats * 0.01, torch.arange(batch).to(device)
        )

    def step(self) -> torch.Tensor:
        """One token int64 [batch] more for each sequence."""
        decode_inputs(
            self._rows, self._lengths, self._tables, self._last_tokens, block_size=BLOCK_SIZE,
            ids=self._ids, positions=self._positions, slots=self._slots,
        )  # fmt: skip
        self._plan.plan(self._lengths, self._rows)
        x = self._embedding[self._ids]
        residual = torch.zeros_like(x)
        heads = self._heads
        for number, (norm, qkv_weight, out_weight, mlp_norm, gate_up, down) in enumerate(self._layers):
            layer = KVLayer(self.keys[number], self.values[number])
            normed = rms_norm(x, norm, 1e-5, residual=residual)
            qkv = self._multiply(normed, qkv_weight).view(len(x), heads + 2 * self._kv_heads, self._dim)
            rope_write_kv(qkv, self._positions, self._cos, self._sin, layer, self._slots)
            seen = decode_attention(qkv[:, :heads], layer, self._tables, self._plan)
            x = self._multiply(seen.flatten(1), out_weight)
            normed = rms_norm(x, mlp_norm, 1e-5, residual=residual)
            if number % 2:
                gated = skinny_linear(normed, gate_up, gated=True)
            else:
                gated = silu_mul(self._multiply(normed, gate_up))
            x = self._multiply(gated, down)
        logits = self._multiply(rms_norm(x, self._norm, 1e-5, residual=residual), self._head).float()
        tokens = sample(logits, self._sampling, self._rows, self._positions + 1)
        self._last_tokens.copy_(tokens)
        self._lengths += 1
        return tokens
