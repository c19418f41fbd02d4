"""The kernels, each with a check: it runs a kernel on a tiny problem and yields its results beside PyTorch's.

PyTorch's results come from the code that serves where there are no Triton kernels.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch
from pagewise_kernels.attention import (
    Chunk,
    DecodePlan,
    PrefillPlan,
    decode_attention,
    decode_latents,
    prefill_attention,
    prefill_latents,
)
from pagewise_kernels.block_copy import copy_blocks, gather_blocks, scatter_blocks
from pagewise_kernels.decode_inputs import decode_inputs
from pagewise_kernels.int4_linear import unpack
from pagewise_kernels.kv_write import write_kv
from pagewise_kernels.logprobs import token_logprobs
from pagewise_kernels.lora import LEAST_RANK, LoraLayer, LoraTiles, add_lora, padded_rank
from pagewise_kernels.matmul import linear
from pagewise_kernels.rope_write_kv import rope_write_kv
from pagewise_kernels.segment_move import move_tokens
from pagewise_kernels.skinny_linear import skinny_linear
from pagewise_shared.sampling import SamplingParams
from torch import nn

from pagewise_executor.adapters.triton_slots import make_tiles
from pagewise_executor.attention.backend import ForwardContext, PagedLayer
from pagewise_executor.attention.triton_attention import LayerKind
from pagewise_executor.kernel_checks.compared import TOLERANCE, Compared
from pagewise_executor.kernel_checks.mixtures import experts, mxfp4_experts
from pagewise_executor.kernel_checks.paged_problems import CONTEXTS, empty_layer, paged_problem, sinks_of, stored_in
from pagewise_executor.kernel_checks.recurrent import recurrent_layers
from pagewise_executor.kernel_checks.use import KernelUse
from pagewise_executor.models.operations import HeadNorm, Operations, Rotation, TritonOperations
from pagewise_executor.models.quantised_linear import QuantisedLinear, ScaledMMLinear
from pagewise_executor.models.skinny_linear import SkinnyLinear
from pagewise_executor.sampling.logprobs import compute_logprobs
from pagewise_executor.sampling.penalties import Penalties, TorchPenalties, TritonPenalties
from pagewise_executor.sampling.token_sampler import TorchTokenSampler, TritonTokenSampler


def _write_kv(use: KernelUse) -> Iterator[Compared]:
    for shape in use.attention:
        layer, slots = empty_layer(use, shape, 4), use.ints(2 * use.block_size + 1, 0, use.block_size - 1)
        k, v = (use.draw(len(slots), shape.kv_heads, shape.head_dim, seed=seed) for seed in range(2))
        v = k[..., -shape.latent :] if shape.latent else v
        v[..., : shape.shared] = k[..., shape.head_dim - shape.shared :]
        write_kv(k, v, layer, slots)
        for found, expected in zip(stored_in(layer), (k, v), strict=True):
            yield Compared(found.flatten(0, 1)[slots], expected, TOLERANCE[use.kv_dtype])


class _Recorder:
    """Takes the place of a step's attention: it keeps the K and V that it gets, and returns the queries."""

    def attend(
        self, layer: PagedLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float,
        window: int | None = None, softcap: float | None = None, sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        self.written = k, v
        return q


def _rope_write_kv(use: KernelUse) -> Iterator[Compared]:
    shape, slots, positions = use.attention[0], use.ints(use.block_size + 1, 0, -1), use.ints(5, 0, 2)
    rows, half = shape.heads + 2 * shape.kv_heads, shape.head_dim // 2
    angles = torch.arange(6, device=use.device)[:, None] / torch.arange(1, half + 1, device=use.device)
    cos, sin = angles.cos().to(use.dtype), angles.sin().to(use.dtype)
    weight = use.draw(rows - shape.kv_heads, shape.head_dim, seed=1)
    norm = HeadNorm(weight, 1e-6) if use.has_head_norm else None
    layer, qkv, recorder = empty_layer(use, shape, 2), use.draw(3, rows, shape.head_dim), _Recorder()
    expected = Operations().attend(
        PagedLayer(layer.keys, layer.values, layer.scales, ForwardContext(recorder)), qkv.clone(),
        replace(shape, window=None),
        Rotation(*(torch.cat([table, table], 1)[positions] for table in (cos, sin))), norm,
    )  # fmt: skip

    rope_write_kv(qkv, positions, cos, sin, layer, slots, head_norm=norm.weight if norm else None, eps=1e-6)
    yield Compared(qkv[:, : shape.heads], expected, TOLERANCE[use.dtype])
    for found, written in zip(stored_in(layer), recorder.written, strict=True):
        yield Compared(found.flatten(0, 1)[slots[:2]], written[:2], TOLERANCE[use.kv_dtype])


def _decode_attention(use: KernelUse) -> Iterator[Compared]:
    for shape in use.attention:
        paged = paged_problem(use, shape)
        q = use.draw(len(CONTEXTS), shape.heads, shape.head_dim, seed=2)
        plan = DecodePlan(
            **LayerKind.of(shape.heads, paged.layer, shape.window)._asdict(), max_queries=len(q), device=use.device,
            deterministic=use.deterministic, max_context=max(CONTEXTS),
        )  # fmt: skip
        plan.plan(use.ints(*CONTEXTS, dtype=torch.int32))
        if shape.latent:
            found = q.new_empty(*q.shape[:2], shape.latent)
            decode_latents(q, paged.layer, paged.tables, plan, out=found, scale=shape.scale)
        else:
            found = decode_attention(
                q, paged.layer, paged.tables, plan, scale=shape.scale, softcap=shape.softcap, sinks=sinks_of(q, shape),
                ring=paged.ring,
            )  # fmt: skip
        for row, length in enumerate(CONTEXTS):  # apart: the longer the context, the smaller the values
            own = slice(row, row + 1)
            yield Compared(found[own], paged.expected(q[own], row, length - 1, shape), TOLERANCE[use.dtype])


def _prefill_attention(use: KernelUse) -> Iterator[Compared]:
    for shape in use.attention:
        paged = paged_problem(use, shape)
        chunks = [Chunk(0, 0, CONTEXTS[1], 1), Chunk(CONTEXTS[1], CONTEXTS[2] - 5, 5, 2)]
        q = use.draw(CONTEXTS[1] + 5, shape.heads, shape.head_dim, seed=2)
        plan = PrefillPlan(
            chunks, **LayerKind.of(shape.heads, paged.layer, shape.window)._asdict(), device=use.device,
            deterministic=use.deterministic,
        )  # fmt: skip
        if shape.latent:
            found = q.new_empty(*q.shape[:2], shape.latent)
            prefill_latents(q, paged.layer, paged.tables, plan, out=found, scale=shape.scale)
        else:
            found = prefill_attention(
                q, paged.layer, paged.tables, plan, scale=shape.scale, softcap=shape.softcap, sinks=sinks_of(q, shape),
                ring=paged.ring,
            )  # fmt: skip
        for chunk in chunks:
            own = slice(chunk.first, chunk.first + chunk.size)
            expected = paged.expected(q[own], chunk.table, chunk.start, shape)
            yield Compared(found[own], expected, TOLERANCE[use.dtype])


def _rms_norm(use: KernelUse) -> Iterator[Compared]:
    x, weight = use.draw(3, use.hidden_size), use.draw(use.hidden_size, seed=1)
    ours, torchs, tolerance = TritonOperations(), Operations(), TOLERANCE[use.dtype]
    yield Compared(ours.rms_norm(x, weight, 1e-6), torchs.rms_norm(x, weight, 1e-6), tolerance)
    sum_found, sum_expected = (use.draw(3, use.hidden_size, seed=2) for _ in range(2))
    found = ours.rms_norm(x, weight, 1e-6, sum_found)
    expected = torchs.rms_norm(x, weight, 1e-6, sum_expected)
    yield Compared(found, expected, tolerance)
    yield Compared(sum_found, sum_expected, tolerance)


def _silu_mul(use: KernelUse) -> Iterator[Compared]:
    assert use.gate_up is not None
    size = len(use.gate_up.weight)  # type: ignore[arg-type]
    x = use.draw(3, size)
    found, expected = (each.gated(nn.Identity(), x) for each in (TritonOperations(), Operations()))
    yield Compared(found, expected, TOLERANCE[use.dtype])


def _skinny_linear(use: KernelUse) -> Iterator[Compared]:
    """Each tile of rows that is used, as a product and with gate, up and their activation."""
    layer = use.gate_up
    assert isinstance(layer, SkinnyLinear)
    for rows in (1, 3, 20, 70):
        if rows <= layer.few_rows:
            x = use.draw(rows, use.hidden_size)
            product = nn.functional.linear(x, layer.weight, layer.bias)
            yield Compared(skinny_linear(x, layer.weight, layer.bias), product, TOLERANCE[use.dtype])
            expected = Operations().gated(nn.Identity(), product)
            yield Compared(layer.gated(x), expected, TOLERANCE[use.dtype])


def _linear(use: KernelUse) -> Iterator[Compared]:
    x, weight = use.draw(3, use.hidden_size), use.draw(128, use.hidden_size, seed=1)
    yield Compared(linear(x, weight), nn.functional.linear(x, weight), TOLERANCE[use.dtype])


def _quantised_linear(use: KernelUse) -> Iterator[Compared]:
    """Where few rows have a kernel of their own, also the kernel that rounds one row, and the one for more rows."""
    for layer in use.linears:
        for rows in (1, 3, layer.few_rows + 1) if isinstance(layer, ScaledMMLinear) else (3,):
            x = use.draw(rows, layer.values.shape[1])
            yield Compared(layer.compute(x), QuantisedLinear.compute(layer, x), TOLERANCE[use.dtype])


def _int4_linear(use: KernelUse) -> Iterator[Compared]:
    assert use.int4 is not None
    weight, bias = use.int4.packed, use.int4.bias
    for rows in (1, 17):
        x = use.draw(rows, weight.ins)
        expected = nn.functional.linear(x.float(), unpack(weight), None if bias is None else bias.float())
        yield Compared(use.int4(x), expected.to(x.dtype), TOLERANCE[use.dtype])


def _lora(use: KernelUse) -> Iterator[Compared]:
    rank, size = padded_rank(use.adapter_rank), use.hidden_size or 256
    x, y = use.draw(3, size), use.draw(3, size, seed=1)
    a, b = use.draw(2, rank, size, seed=2), use.draw(2, size, rank, seed=3)
    slots = np.array([1, -1, 0])
    tiles, order = (torch.from_numpy(each).to(use.device) for each in make_tiles(slots, LEAST_RANK))
    expected = y.float().clone()
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[row] += b[slot].float() @ (a[slot].float() @ x[row].float())
    add_lora(x, y, LoraLayer(a, b, (size,)), LoraTiles(tiles, order, LEAST_RANK))
    yield Compared(y, expected, TOLERANCE[use.dtype])


def _block_copies(use: KernelUse) -> Iterator[Compared]:
    size = use.attention[0].kv_heads * use.attention[0].head_dim * use.block_size * use.kv_dtype.itemsize
    generator = torch.Generator().manual_seed(0)
    pool = torch.randint(256, (2, 6, size), dtype=torch.uint8, generator=generator).to(use.device)
    before, blocks = pool.clone(), use.ints(4, 1)
    copy_blocks(pool, use.ints(0, 5, 2, 3).view(2, 2))
    before[:, [5, 3]] = before[:, [0, 2]]
    yield Compared(pool, before)
    # On the host, as the host tier has it, where there is one.
    pinned = use.device.type == "cuda"
    staged = torch.zeros(2, 2 * size, dtype=torch.uint8, device=None if pinned else use.device, pin_memory=pinned)
    gather_blocks(pool, blocks, staged)
    if pinned:
        torch.cuda.synchronize(use.device)
    yield Compared(staged.to(use.device), torch.cat([before[0, [4, 1]], before[1, [4, 1]]], 1))
    scatter_blocks(pool, use.ints(1, 2), staged)
    before[:, [1, 2]] = before[:, [4, 1]]
    yield Compared(pool, before)


def _decode_inputs(use: KernelUse) -> Iterator[Compared]:
    rows, lengths = use.ints(1, 0, 0, dtype=torch.int32), use.ints(18, 0, 3, dtype=torch.int32)
    tables = use.ints(7, 8, 9, 5, 6, 4, dtype=torch.int32).view(2, 3)
    ids, positions, slots = (torch.zeros(3, dtype=torch.int64, device=use.device) for _ in range(3))
    decode_inputs(rows, lengths, tables, use.ints(11, 12), block_size=16, ids=ids, positions=positions, slots=slots)
    yield Compared(ids, use.ints(12, 0, 11))
    yield Compared(positions, use.ints(17, 0, 2))
    yield Compared(slots, use.ints(6 * 16 + 1, -1, 7 * 16 + 2))


def _move_tokens(use: KernelUse) -> Iterator[Compared]:
    assert use.rotation is not None
    paged = paged_problem(use, use.attention[0])
    layer, (keys, values) = paged.layer, (each.flatten(0, 1) for each in paged.written)
    sources, targets, distances = use.ints(3, 0), use.ints(2 * use.block_size, use.block_size + 1), use.ints(7, 1000)
    cos, sin = use.rotation.angles(distances)
    move_tokens(layer, sources, targets, cos, sin, interleaved=use.rotation.interleaved)
    moved_keys, moved_values = (each.flatten(0, 1)[targets] for each in stored_in(layer))
    yield Compared(moved_keys, use.rotation.rotate(keys[sources], cos, sin), TOLERANCE[use.kv_dtype])
    yield Compared(moved_values, values[sources])


_PARAMS = [
    SamplingParams(temperature=0.0, repetition_penalty=1.3),
    SamplingParams(temperature=0.7, seed=2**63 + 5, top_k=5, presence_penalty=0.5),
    SamplingParams(temperature=1.3, seed=7, top_p=0.8, min_p=0.01, frequency_penalty=0.7),
    SamplingParams(temperature=1.0, seed=9),
]


def _logits(use: KernelUse) -> torch.Tensor:
    return 3 * use.draw(len(_PARAMS), use.vocab_size).float()


def _sample(use: KernelUse) -> Iterator[Compared]:
    samplers = TritonTokenSampler(len(_PARAMS), use.device), TorchTokenSampler(use.device)
    rows, positions = list(range(len(_PARAMS))), use.ints(5, 70, 0, 2**33)
    for sampler in samplers:
        for row in rows:
            sampler.join(row, _PARAMS[row])
    found, expected = (sampler.sample(_logits(use), rows, positions) for sampler in samplers)
    yield Compared(found, expected)


def _logprobs(use: KernelUse) -> Iterator[Compared]:
    tokens = use.ints(0, 1, 2, use.vocab_size - 1)
    for logits in {use.dtype: _logits(use).to(use.dtype), torch.float32: _logits(use)}.values():
        found, expected = (compute(logits, tokens) for compute in (token_logprobs, compute_logprobs))
        yield Compared(found[0], expected[0], TOLERANCE[torch.float32])
        yield Compared(found[1], expected[1])


def _penalise(use: KernelUse) -> Iterator[Compared]:
    rows, tokens = list(range(len(_PARAMS))), np.array([1, 2, 2, 3, 3, 3], np.int32)
    found, expected = _logits(use), _logits(use)
    ways: list[tuple[Penalties, torch.Tensor]] = [
        (TritonPenalties(len(rows), use.vocab_size, use.device), found),
        (TorchPenalties(use.vocab_size, use.device), expected),
    ]
    for penalties, logits in ways:
        for row in rows:
            penalties.join(row, tokens, 2, _PARAMS[row])
        penalties.apply(logits, rows, rows)
    yield Compared(found, expected, TOLERANCE[torch.float32])


def _always(_: KernelUse) -> bool:
    return True


def _has_skinny_linear(use: KernelUse) -> bool:
    return isinstance(use.gate_up, SkinnyLinear) and use.gate_up.few_rows > 0  # 0: it does not work, or is slower


Check = Callable[[KernelUse], Iterator[Compared]]
KERNELS: dict[str, tuple[Callable[[KernelUse], bool], Check]] = {
    "decode inputs": (_always, _decode_inputs),
    "RMSNorm": (lambda use: use.hidden_size > 0, _rms_norm),
    "RoPE with KV write": (lambda use: use.hidden_size > 0, _rope_write_kv),
    "KV write": (lambda use: use.writes_kv, _write_kv),
    "decode attention": (_always, _decode_attention),
    "prefill attention": (_always, _prefill_attention),
    "SiLU": (lambda use: use.gate_up is not None, _silu_mul),
    "linear of few rows": (_has_skinny_linear, _skinny_linear),
    "mixture of experts": (lambda use: use.mixture is not None, experts),
    "experts in MXFP4": (lambda use: use.mxfp4 is not None, mxfp4_experts),
    "recurrent layers": (lambda use: bool(use.recurrent), recurrent_layers),
    "deterministic linear": (lambda use: use.deterministic, _linear),
    "linear in four bits": (lambda use: use.int4 is not None, _int4_linear),
    "quantised linear": (lambda use: bool(use.linears), _quantised_linear),
    "LoRA": (lambda use: use.adapter_rank > 0, _lora),
    "block copies": (_always, _block_copies),
    "segment moves": (lambda use: use.rotation is not None, _move_tokens),
    "sampling": (_always, _sample),
    "penalties": (_always, _penalise),
    "log-probabilities": (_always, _logprobs),
}
"""By name, whether a configuration uses a kernel, and its check, which yields results beside PyTorch's."""
READS_KV = {"RoPE with KV write", "KV write", "decode attention", "prefill attention", "segment moves"}


def kernels_of(use: KernelUse) -> list[str]:
    """Return the names of the kernels that are used, in the order in which a step runs them."""
    return [name for name, (is_used, _) in KERNELS.items() if is_used(use)]
