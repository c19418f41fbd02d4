"""Recurrent layers over flat batches, compared with the functions of transformers for each sequence and token."""

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from pagewise_kernels.cpu.recurrent import Places, Weights
from pagewise_kernels.recurrent import (
    CHUNK,
    BlockStates,
    ChunkPlan,
    Recurrence,
    ShortConvolution,
    convolve_short,
    recur,
)

delta_rule = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next").torch_recurrent_gated_delta_rule
kimi_rule = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear").recurrent_kimi_delta_attention
state_update = pytest.importorskip("transformers.models.nemotron_h.modeling_nemotron_h").mamba2_selective_state_update


class Sequence(NamedTuple):
    """Tokens of a sequence in a step: ``read`` is its block, None if it begins; ``written`` are the blocks into which
    its states go behind so many tokens."""

    read: int | None
    written: dict[int, int]

    @property
    def size(self) -> int:
        return max(self.written)


SEQUENCES = [
    Sequence(0, {1: 0}),
    Sequence(1, {1: 2}),
    Sequence(None, {1: 3}),
    Sequence(4, {5: 4}),
    Sequence(None, {CHUNK: 5, 2 * CHUNK + 3: 6}),
    Sequence(7, {1: 7, 2: 8, 3: 9, 19: 10}),
    Sequence(11, {CHUNK + 1: 12}),
]
BLOCKS, PADDING = 13, 3


def plan_of(sequences: list[Sequence], device: torch.device, *, padded: bool = False) -> ChunkPlan:
    firsts, chunks, offset = [0], [], 0
    for read, written in sequences:
        begin, at = offset, 0
        for end, block in sorted(written.items()):
            while at < end:
                stop = min(at + CHUNK, end)
                chunks.append([
                    begin + at, begin + stop, -1 if read is None else read, block if stop == end else -1, begin,
                    int(max(written) == 1),
                ])  # fmt: skip
                at = stop
        offset += at
        firsts.append(len(chunks))
    if padded:
        firsts += [len(chunks)] * 2
        chunks += [[0] * 6] * 2
    made = [torch.tensor(one, dtype=torch.int32, device=device) for one in ([offset], firsts, chunks)]
    return ChunkPlan(*made, longer=any(one.size > 1 for one in sequences))


class Problem:
    """A layer with random weights, projections of a flat batch, and blocks of states in pages."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype, *, delta: bool, heads: int, groups: int, key: int, value: int,
        kept: int = 4, width: int = 4, page: int = 1024, start: int = 0, norm: int = 0, gate_first: bool = False,
        bias: bool = False, by_key: bool = False, sequences: list[Sequence] = SEQUENCES,
    ) -> None:  # fmt: skip
        torch.manual_seed(3)
        channels, inner = 2 * groups * key + heads * value, heads * value
        self.state = (heads, key, value) if delta else (heads, value, key)
        self.sequences, self.kept, self.groups = sequences, kept, groups
        decays = heads * key if by_key else heads
        row = channels + inner + decays + heads
        conv, gate, decay, beta = torch.randperm(row, device=device).split([channels, inner, decays, heads])
        self.places = Places(conv=conv, gate=gate, decay=decay, beta=beta if delta else None)
        draw = lambda *shape: torch.randn(*shape, device=device)  # noqa: E731
        self.weights = Weights(
            conv=draw(channels, width) / 2, conv_bias=draw(channels) if bias else None, a_log=draw(heads),
            dt_bias=draw(decays), skip=None if delta else draw(heads), norm=draw(inner) if norm else None,
            norm_size=norm or 1, gate_first=gate_first, beta_scale=2.0 if norm else 1.0,
            gate="sigmoid" if by_key else "silu",
        )  # fmt: skip
        tokens = sum(one.size for one in sequences) + PADDING
        self.projected = draw(tokens, row).to(dtype)
        self.conv, self.recurrent = draw(BLOCKS, channels, kept).to(dtype), draw(BLOCKS, *self.state) / 2
        parts = [one.flatten(1).view(torch.uint8) for one in (self.conv, self.recurrent)]
        self.starts = start, start + parts[0].shape[1]
        per_block = -(-(self.starts[1] + parts[1].shape[1]) // page)
        pages = torch.randperm(BLOCKS * per_block, device=device).int().view(BLOCKS, per_block)
        content = torch.zeros(BLOCKS, per_block * page, dtype=torch.uint8, device=device)
        content[:, start : start + sum(one.shape[1] for one in parts)] = torch.cat(parts, 1)
        self.memory = torch.zeros(BLOCKS * per_block, page, dtype=torch.uint8, device=device)
        self.memory[pages.long()] = content.view(BLOCKS, per_block, page)
        self.pages = pages
        self.blocks = [
            BlockStates(self.memory, pages, at, kind)
            for at, kind in zip(self.starts, (dtype, torch.float32), strict=True)
        ]

    def found_states(self) -> list[torch.Tensor]:
        content = self.memory[self.pages.long()].flatten(1)
        found = []
        for at, like in zip(self.starts, (self.conv, self.recurrent), strict=True):
            part = content[:, at : at + like[0].numel() * like.element_size()].contiguous()
            found.append(part.view(like.dtype).view(like.shape))
        return found

    def expected(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Outputs, and the states of all blocks, in float64 token by token."""
        places, weights, double = self.places, self.weights, self.projected.double()
        conv, recurrent = self.conv.double(), self.recurrent.double()
        outputs, offset = [], 0
        for read, written in self.sequences:
            held = conv[read].clone() if read is not None else torch.zeros_like(conv[0])
            state = recurrent[read].clone() if read is not None else torch.zeros_like(recurrent[0])
            for at in range(1, max(written) + 1):
                row = double[offset]
                offset += 1
                window = torch.cat([held, row[places.conv][:, None]], 1)
                held, window = window[:, 1:], window[:, -weights.conv.shape[1] :]
                mixed = (window * weights.conv.double()).sum(1)
                mixed = F.silu(mixed if weights.conv_bias is None else mixed + weights.conv_bias)
                state, result = self._update(mixed, row, state)
                gate = row[places.gate]
                outputs.append(self._gated(result, F.silu(gate) if weights.gate == "silu" else gate.sigmoid()))
                if at in written:
                    conv[written[at]], recurrent[written[at]] = held, state
        padding = torch.zeros(PADDING, outputs[0].numel(), dtype=torch.float64, device=double.device)
        return torch.cat([torch.stack(outputs), padding]), conv, recurrent

    def _update(self, mixed: torch.Tensor, row: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, (heads, *_), groups = self.weights, self.state, self.groups
        dt = row[self.places.decay]
        if weights.skip is None:
            key, value = self.state[1:]
            q, k, v = mixed.split([groups * key, groups * key, heads * value])
            assert self.places.beta is not None
            by_head = F.softplus(dt + weights.dt_bias).view(heads, -1)
            by_head = (-weights.a_log.exp()[:, None] * by_head)[None, None]
            rule, decay = (delta_rule, by_head[..., 0]) if by_head.shape[3] == 1 else (kimi_rule, by_head)
            result, state = rule(
                q.view(1, 1, groups, key), k.view(1, 1, groups, key), v.view(1, 1, heads, value), g=decay,
                beta=(weights.beta_scale * row[self.places.beta].sigmoid())[None, None],
                initial_state=state[None], output_final_state=True, use_qk_l2norm_in_kernel=True,
            )  # fmt: skip
            return state[0].double(), result.flatten().double()
        value, key = self.state[1:]
        x, b, c = mixed.split([heads * value, groups * key, groups * key])
        held = state[None].clone()
        result = state_update(
            held, x.view(1, heads, value), dt[None, :, None].expand(1, heads, value),
            (-weights.a_log.exp())[:, None, None].expand(*self.state), b.view(1, groups, key), c.view(1, groups, key),
            weights.skip[:, None].expand(heads, value), dt_bias=weights.dt_bias[:, None].expand(heads, value),
            dt_softplus=True,
        )  # fmt: skip
        return held[0], result.flatten()

    def _gated(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        weights = self.weights
        if weights.gate_first or weights.norm is None:
            x = x * gate
        if weights.norm is not None:
            groups = x.view(-1, weights.norm_size)
            groups = groups * (groups.square().mean(1, keepdim=True) + weights.eps).rsqrt()
            x = groups.flatten() * weights.norm
            x = x if weights.gate_first else x * gate
        return x

    def check(self, tolerance: float, *, padded: bool = False) -> None:
        layer = Recurrence(self.weights, self.places, self.state, self.kept)
        plan = plan_of(self.sequences, self.projected.device, padded=padded)
        expected = self.expected()
        outputs = recur(layer, self.projected, plan, *self.blocks)
        for found, wanted in zip((outputs, *self.found_states()), expected, strict=True):
            torch.testing.assert_close(
                found.double(), wanted, atol=tolerance * float(wanted.abs().max()), rtol=tolerance
            )


SHAPES: dict[str, dict[str, Any]] = {
    "delta": {"delta": True, "heads": 2, "groups": 1, "key": 16, "value": 32, "norm": 32},
    "delta of odd sizes, rows across pages": {
        "delta": True, "heads": 3, "groups": 3, "key": 10, "value": 7, "kept": 3, "page": 76, "start": 4, "bias": True,
        "norm": 7, "gate_first": True,
    },
    "kda": {"delta": True, "heads": 2, "groups": 2, "key": 16, "value": 32, "norm": 32, "by_key": True},
    "kda of odd sizes": {
        "delta": True, "heads": 2, "groups": 2, "key": 10, "value": 7, "kept": 3, "page": 76, "start": 4, "bias": True,
        "by_key": True,
    },
    "mamba": {
        "delta": False, "heads": 2, "groups": 1, "key": 16, "value": 16, "norm": 32, "gate_first": True, "bias": True,
    },
    "mamba of odd sizes without norm": {
        "delta": False, "heads": 4, "groups": 2, "key": 9, "value": 5, "width": 2, "kept": 2, "page": 116, "start": 8,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_decodes_and_chunks_together(name: str, device: torch.device) -> None:
    Problem(device, torch.float32, **SHAPES[name]).check(1e-4, padded="odd" in name)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["delta", "kda", "mamba"])
def test_sixteen_bits(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """States stay in float32; products take keys and values in 16 bits, as the models do."""
    sequences = [SEQUENCES[0], SEQUENCES[1], Sequence(7, {CHUNK + 1: 7})]
    Problem(device, dtype, **SHAPES[name], sequences=sequences).check(0.02 if dtype == torch.float16 else 0.1)


@pytest.mark.parametrize("name", ["delta", "kda", "mamba"])
def test_decodes_alone(name: str, device: torch.device) -> None:
    Problem(device, torch.float32, **SHAPES[name], sequences=SEQUENCES[:3]).check(1e-4, padded=True)


@pytest.mark.parametrize("longer", [False, True])
def test_short_convolutions(longer: bool, device: torch.device) -> None:
    """Of products of two inputs; a third one multiplies the result."""
    torch.manual_seed(3)
    sequences, channels, kept = SEQUENCES if longer else SEQUENCES[:3], 37, 3
    tokens = sum(one.size for one in sequences)
    projected = torch.randn(tokens + PADDING, 3 * channels, device=device)
    conv, factor, gate = torch.randperm(3 * channels, device=device).view(3, channels)
    weight, bias = torch.randn(channels, 3, device=device), torch.randn(channels, device=device)
    states = torch.randn(BLOCKS, channels, kept, device=device)
    memory, tables = states.flatten(1).clone(), torch.arange(BLOCKS, dtype=torch.int32, device=device)[:, None]
    layer = ShortConvolution(weight, bias, conv, factor, gate, kept)
    plan = plan_of(sequences, projected.device, padded=True)
    found = convolve_short(layer, projected, plan, BlockStates(memory.view(torch.uint8), tables, 0, torch.float32))
    inputs, offset = projected[:, conv] * projected[:, factor], 0
    expected, after = torch.zeros_like(found), states.clone()
    for one in sequences:
        begin = states[one.read] if one.read is not None else torch.zeros_like(states[0])
        joined = torch.cat([begin, inputs[offset : offset + one.size].T], dim=1)
        mixed = F.conv1d(joined[None, :, 1:], weight[:, None], bias, groups=channels)[0].T
        expected[offset : offset + one.size] = mixed * projected[offset : offset + one.size][:, gate]
        for at, block in one.written.items():
            after[block] = joined[:, at : at + kept]
        offset += one.size
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(memory.view_as(after), after)


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    problem = Problem(device, torch.float32, **SHAPES["delta"], sequences=SEQUENCES[:3])
    plan, layer = plan_of(SEQUENCES[:3], device), Recurrence(problem.weights, problem.places, problem.state, 4)
    conv, state = problem.blocks
    with pytest.raises(ValueError, match="rows of projections"):
        recur(layer, problem.projected[:, :-1], plan, conv, state)
    with pytest.raises(ValueError, match="do not fit 1 pages"):
        recur(
            layer,
            problem.projected,
            plan,
            conv,
            BlockStates(problem.memory, conv.tables[:, :1].contiguous(), 0, torch.float32),
        )
    with pytest.raises(ValueError, match="values of 4 bytes do not fit"):
        BlockStates(problem.memory, problem.pages, 2, torch.float32)
    with pytest.raises(ValueError, match="do not fit a state"):
        Recurrence(problem.weights, problem.places, (2, 16, 31), 4)
