"""Recurrent layers in C against oracles in float64 and transformers' functions, in every build."""

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from pagewise_kernels.cpu.recurrent import Blocks, Places, RecurrentStep, Weights
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_chunk_scan, mamba2_selective_state_update
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

pytestmark = pytest.mark.usefixtures("build")

Kind = Literal["delta", "kda", "mamba", "conv"]


class Shape(NamedTuple):
    """``kept``: inputs of a channel in a conv state; ``page``: bytes."""

    sequences: int
    tokens: int
    heads: int
    groups: int
    key: int
    value: int
    width: int
    kept: int
    page: int


# Whole and cut vectors, columns, tiles and stretches of tokens, conv states of each kind, and pages that cut states
# anywhere.
SHAPES = [
    Shape(1, 1, 4, 2, 16, 32, 4, 4, 1 << 16),
    Shape(3, 1, 6, 3, 20, 13, 4, 3, 1000),
    Shape(2, 19, 6, 3, 20, 13, 4, 3, 1000),
    Shape(16, 1, 8, 8, 64, 128, 4, 4, 4096),
    Shape(2, 33, 8, 8, 64, 128, 4, 4, 4096),
    Shape(5, 3, 2, 1, 128, 64, 2, 5, 12345),
    Shape(1, 100, 2, 1, 128, 64, 2, 5, 12345),
    Shape(2, 16, 3, 1, 7, 100, 3, 2, 36),
]


class Layer:
    """A layer with random weights, and the states of sequences before their tokens."""

    def __init__(self, shape: Shape, kind: Kind, norm: str, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.shape, self.kind, self.norm = shape, kind, norm
        heads, inner = shape.heads, shape.heads * shape.value
        channels = inner + 2 * shape.groups * shape.key if kind != "conv" else inner
        decays = heads * shape.key if kind == "kda" else heads
        self.size = 2 * channels + inner + decays + heads + 5
        parts = torch.randperm(self.size).split([channels, channels, inner, decays, heads, 5])
        conv, times, gate, decay, beta = parts[:5]
        if seed % 2:  # neighbours are loaded together
            conv, gate = torch.arange(channels) + 7, torch.arange(inner) + 3
        recurrent: dict[str, Any] = {"a_log": torch.rand(heads).mul(8).log(), "dt_bias": torch.randn(decays)}
        self.places = Places(
            conv=conv, gate=gate, times=times if kind == "conv" else None, decay=None if kind == "conv" else decay,
            beta=beta if kind in ("delta", "kda") else None,
        )  # fmt: skip
        size = {"head": shape.value, "all": inner}.get(norm, 1)
        weight = torch.randn(inner) if norm != "none" else None
        if norm == "head":
            weight = torch.randn(shape.value).repeat(heads)
        self.weights = Weights(
            conv=torch.randn(channels, shape.width) / 2, conv_bias=torch.randn(channels) if norm != "head" else None,
            conv_silu=kind != "conv", skip=torch.randn(heads) if kind == "mamba" else None, norm=weight, norm_size=size,
            gate_first=norm == "all", eps=1e-5, beta_scale=2.0 if norm == "all" else 1.0,
            gate={"kda": "sigmoid", "conv": "alone"}.get(kind, "silu"),  # type: ignore[arg-type]
            **recurrent if kind != "conv" else {},
        )  # fmt: skip
        sizes = (shape.value, shape.key) if kind == "mamba" else (shape.key, shape.value)
        self.state_shape = (heads, *sizes) if kind != "conv" else None
        self.step = RecurrentStep(self.weights, self.places, self.state_shape, shape.kept)
        self.conv = torch.randn(shape.sequences, channels, shape.kept)
        self.state = torch.randn(shape.sequences, *(self.state_shape or (0,)))

    def rows(self) -> torch.Tensor:
        """Projections of all tokens [sequences, tokens, size]."""
        return torch.randn(self.shape.sequences, self.shape.tokens, self.size)

    def expected(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Outputs, conv states and states in float64, of one token after the other."""
        conv, state = self.conv, self.state.double()
        outs = []
        for row in rows.double().unbind(1):
            out, conv, state = self._token(row, conv, state)
            outs.append(out)
        return torch.stack(outs, dim=1), conv, state

    def _token(self, row: torch.Tensor, conv: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, ...]:
        shape, weights, places = self.shape, self.weights, self.places
        given = row[:, places.conv] if places.times is None else row[:, places.conv] * row[:, places.times]
        held = torch.cat([conv.double(), given[..., None]], dim=2)
        mixed = (held[..., -shape.width :] * weights.conv.double()).sum(2)
        mixed = mixed + (0 if weights.conv_bias is None else weights.conv_bias.double())
        gate = row[:, places.gate]
        if self.kind == "conv":
            return self._normed(mixed, gate), held[..., -shape.kept :], state
        mixed = F.silu(mixed)
        assert places.decay is not None
        assert weights.a_log is not None
        dt = (F.softplus(row[:, places.decay] + weights.dt_bias)).view(len(row), shape.heads, -1)
        decay = torch.exp(-weights.a_log.double().exp()[:, None] * dt)[..., None]
        inner, keys = shape.heads * shape.value, shape.groups * shape.key
        repeated = shape.heads // shape.groups

        def per_head(x: torch.Tensor) -> torch.Tensor:
            return x.view(len(x), shape.groups, shape.key).repeat_interleave(repeated, dim=1)

        if self.kind == "mamba":
            assert weights.skip is not None
            value, key, query = mixed.split([inner, keys, keys], dim=1)
            value, key, query = value.view(-1, shape.heads, shape.value), per_head(key), per_head(query)
            state = state * decay + (dt * value)[..., None] * key[..., None, :]
            out = torch.einsum("nhvk,nhk->nhv", state, query) + weights.skip.double()[:, None] * value
            return self._normed(out.flatten(1), F.silu(gate)), held[..., -shape.kept :], state
        query, key = (per_head(x) for x in mixed[:, : 2 * keys].split(keys, dim=1))
        query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
        value = mixed[:, 2 * keys :].view(-1, shape.heads, shape.value)
        beta = weights.beta_scale * row[:, places.beta].sigmoid()
        state = state * decay
        delta = beta[..., None] * (value - torch.einsum("nhkv,nhk->nhv", state, key))
        state = state + key[..., None] * delta[..., None, :]
        out = torch.einsum("nhkv,nhk->nhv", state, query) / shape.key**0.5
        gate = gate.sigmoid() if self.kind == "kda" else F.silu(gate)
        return self._normed(out.flatten(1), gate), held[..., -shape.kept :], state

    def _normed(self, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        weights = self.weights
        out = out * gate if weights.gate_first else out
        if weights.norm is not None:
            parts = out.unflatten(1, (-1, weights.norm_size))
            parts = parts / (parts.square().mean(-1, keepdim=True) + weights.eps).sqrt()
            out = parts.flatten(1) * weights.norm
        return out if weights.gate_first else out * gate

    def found(
        self, rows: torch.Tensor, *, apart: bool = True, begins: bool = False, writes: bool = True,
        cuts: tuple[int, ...] = (),
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        """Outputs, conv states and states by the operation. ``apart``: it writes other blocks than it reads.
        ``begins``: there are no states. ``writes``: new states are written. ``cuts``: where the tokens are cut."""
        count, tokens = rows.shape[:2]
        page, kind = self.shape.page, rows.dtype
        starts = 12, 12 + self.conv[0].numel() * kind.itemsize + 8
        bytes_per_block = starts[1] + self.state[0].numel() * 4
        per_block = -(-bytes_per_block // page)
        memory = torch.randint(0, 256, (2 * count * per_block + 3, page), dtype=torch.uint8)
        pages = torch.randperm(len(memory))[: 2 * count * per_block].int().view(2, count, per_block)
        pages[:, -1] = pages[:, -1].sort(dim=1).values  # neighbours are computed in place
        read, written = pages if apart else (pages[0], pages[0])
        content = torch.zeros(count, per_block * page, dtype=torch.uint8)
        for start, state in zip(starts, (self.conv.to(kind), self.state), strict=True):
            raw = state.flatten(1).contiguous().view(torch.uint8)
            content[:, start : start + raw.shape[1]] = raw
        memory[read] = content.view(count, per_block, page)
        before = memory.clone()
        places = torch.randperm(count * tokens + 2)[: count * tokens].view(count, tokens)
        flat = torch.empty(count * tokens + 2, rows.shape[2], dtype=kind)
        flat[places] = rows
        outputs = torch.full((len(flat), self.step.empty_outputs(flat).shape[1]), 7.0, dtype=kind)
        source: torch.Tensor | None = None if begins else read
        for first, last in zip((0, *cuts), (*cuts, tokens), strict=True):
            part = places[:, first:last].contiguous()
            self.step.compute(flat, part, Blocks(memory, source, written if writes else None, *starts), outputs)
            source = written
        after, results = memory[written].flatten(1), []
        for start, state in zip(starts, (self.conv.to(kind), self.state), strict=True):
            part = after[:, start : start + state[0].numel() * state.dtype.itemsize].flatten().clone()
            results.append(part.view(state.dtype).view(state.shape))
        others = torch.ones(len(memory), dtype=torch.bool)
        others[written.flatten()] = False
        assert torch.equal(memory[others], before[others])
        old = before[written].flatten(1)
        assert torch.equal(after[:, : starts[0]], old[:, : starts[0]])
        assert torch.equal(after[:, bytes_per_block:], old[:, bytes_per_block:])
        alone = torch.ones(len(flat), dtype=torch.bool)
        alone[places.flatten()] = False
        assert (outputs[alone] == 7).all()
        return outputs[places], results[0], results[1]


@pytest.mark.parametrize("norm", ["head", "all", "none"])
@pytest.mark.parametrize("kind", ["delta", "kda", "mamba", "conv"])
@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_are_computed_as_the_oracle_does(shape: Shape, kind: Kind, norm: str) -> None:
    layer = Layer(shape, kind, norm, seed=len(norm))
    rows = layer.rows()
    expected = layer.expected(rows)
    for apart in (True, False):
        out, conv, state = layer.found(rows, apart=apart)
        torch.testing.assert_close(conv.double(), expected[1].double(), atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(state.double(), expected[2], atol=3e-5, rtol=1e-5)
        torch.testing.assert_close(out.double(), expected[0], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("kind", ["delta", "kda", "mamba", "conv"])
@pytest.mark.parametrize("shape", SHAPES[2:7:2])
def test_sequences_begin_with_states_of_zeros(shape: Shape, kind: Kind) -> None:
    layer = Layer(shape, kind, "head")
    rows = layer.rows()
    found = layer.found(rows, begins=True)
    layer.conv.zero_()
    layer.state.zero_()
    for one, expected in zip(found, layer.found(rows), strict=True):
        assert torch.equal(one, expected)


@pytest.mark.parametrize("kind", ["delta", "kda", "mamba", "conv"])
def test_results_do_not_depend_on_where_tokens_are_cut(kind: Kind) -> None:
    """To the last bit."""
    layer = Layer(SHAPES[4], kind, "head")
    rows = layer.rows()
    whole = layer.found(rows)
    for cuts in ((1,), (15, 16, 17), (16, 32), tuple(range(1, 33))):
        for one, expected in zip(layer.found(rows, cuts=cuts), whole, strict=True):
            assert torch.equal(one, expected)


@pytest.mark.parametrize("kind", ["delta", "kda", "mamba", "conv"])
@pytest.mark.parametrize("shape", SHAPES[:3])
def test_bfloat16_is_computed_in_float32(shape: Shape, kind: Kind) -> None:
    """Outputs, conv states and products before them are rounded, and nothing else is."""
    layer = Layer(shape, kind, "head", seed=int(kind != "conv"))
    rows, layer.conv = layer.rows().bfloat16(), layer.conv.bfloat16().float()
    out, conv, state = layer.found(rows)
    assert (out.dtype, conv.dtype) == (torch.bfloat16, torch.bfloat16)
    if kind == "conv":
        assert layer.places.times is not None
        rows[..., layer.places.conv] *= rows[..., layer.places.times]
        rows[..., layer.places.times] = 1
    expected = layer.found(rows.float())
    assert torch.equal(out, expected[0].bfloat16())
    assert torch.equal(conv, expected[1].bfloat16())
    assert torch.equal(state, expected[2])


@pytest.mark.parametrize("kind", ["delta", "mamba", "conv"])
@pytest.mark.parametrize("begins", [True, False])
def test_states_stay_as_they_are_where_none_are_written(kind: Kind, begins: bool) -> None:
    layer = Layer(SHAPES[2], kind, "head")
    rows = layer.rows()
    out, conv, state = layer.found(rows, begins=begins, writes=False, apart=False)
    assert torch.equal(out, layer.found(rows, begins=begins)[0])
    assert torch.equal(conv, layer.conv)
    assert torch.equal(state, layer.state)


def mixed_of(layer: Layer, rows: torch.Tensor) -> torch.Tensor:
    """The convolution's result [sequences, tokens, channels]."""
    inputs = torch.cat([layer.conv, rows[..., layer.places.conv].transpose(1, 2)], dim=2)
    mixed = F.conv1d(inputs, layer.weights.conv[:, None], layer.weights.conv_bias, groups=inputs.shape[1])
    return F.silu(mixed[..., -rows.shape[1] :]).transpose(1, 2)


@pytest.mark.parametrize("tokens", [1, 7, 64, 130])
@pytest.mark.parametrize("kind", ["delta", "kda"])
def test_the_delta_rules_are_those_of_transformers(kind: Kind, tokens: int) -> None:
    shape = Shape(3, tokens, 4, 4, 24, 40, 4, 4, 4096)
    layer = Layer(shape, kind, "none")
    rows = layer.rows()
    rows[..., layer.places.gate] = 30.0
    out, _, state = layer.found(rows)
    keys = shape.groups * shape.key
    query, key, value = mixed_of(layer, rows).split([keys, keys, shape.heads * shape.value], dim=2)
    assert layer.weights.a_log is not None
    decay = F.softplus(rows[..., layer.places.decay] + layer.weights.dt_bias).view(3, tokens, shape.heads, -1)
    decay = -layer.weights.a_log.exp()[:, None] * decay
    rule: Any = torch_chunk_gated_delta_rule if tokens > 1 else torch_recurrent_gated_delta_rule
    expected, expected_state = (chunk_kimi_delta_attention if kind == "kda" else rule)(
        *(x.view(3, tokens, shape.groups, shape.key) for x in (query, key)),
        value.view(3, tokens, shape.heads, shape.value), g=decay if kind == "kda" else decay[..., 0],
        beta=rows[..., layer.places.beta].sigmoid(), initial_state=layer.state, output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    torch.testing.assert_close(state, expected_state, atol=3e-5, rtol=1e-4)
    out = out / (1 if kind == "kda" else 30)
    torch.testing.assert_close(out, expected.flatten(2), atol=5e-5, rtol=1e-3)


@pytest.mark.parametrize("limits", [(0.0, math.inf), (0.3, 1.5)])
@pytest.mark.parametrize("tokens", [1, 7, 64, 130])
def test_mamba_2_is_that_of_transformers(tokens: int, limits: tuple[float, float]) -> None:
    shape = Shape(3, tokens, 4, 2, 24, 40, 4, 4, 4096)
    layer = Layer(shape, "mamba", "none")
    limited = dataclasses.replace(layer.weights, dt_limits=limits)
    layer.step = RecurrentStep(limited, layer.places, layer.state_shape, shape.kept)
    rows = layer.rows()
    rows[..., layer.places.gate] = 30.0
    out, _, state = layer.found(rows)
    keys, sizes, weights = shape.groups * shape.key, (shape.heads, shape.value), layer.weights
    value, key, query = mixed_of(layer, rows).split([shape.heads * shape.value, keys, keys], dim=2)
    assert weights.skip is not None
    assert weights.a_log is not None
    assert weights.dt_bias is not None
    decay, rate, expected_state = rows[..., layer.places.decay], -weights.a_log.exp(), layer.state.clone()
    if tokens == 1:
        expected = mamba2_selective_state_update(
            expected_state, value.view(-1, *sizes), decay.transpose(1, 2).expand(-1, *sizes),
            rate[:, None, None].expand(*sizes, shape.key), *(x.view(-1, shape.groups, shape.key) for x in (key, query)),
            weights.skip[:, None].expand(sizes), dt_bias=weights.dt_bias[:, None].expand(sizes), dt_softplus=True,
        )[:, None]  # fmt: skip
    else:
        expected, expected_state = mamba2_chunk_scan(
            value.view(3, tokens, *sizes), decay, rate,
            *(x.view(3, tokens, shape.groups, shape.key) for x in (key, query)), 16, D=weights.skip,
            dt_bias=weights.dt_bias, dt_softplus=True, initial_states=layer.state, dt_limit=limits,
            return_final_states=True,
        )  # fmt: skip
    torch.testing.assert_close(state, expected_state, atol=5e-5, rtol=1e-4)
    torch.testing.assert_close(out / 30, expected.flatten(2), atol=2e-4, rtol=1e-3)


def test_a_sequence_has_the_same_output_with_others_beside_it() -> None:
    layer = Layer(SHAPES[3], "delta", "head")
    rows = layer.rows()
    together = layer.found(rows)
    layer.conv, layer.state = layer.conv[7:8], layer.state[7:8]
    for alone, one in zip(layer.found(rows[7:8]), together, strict=True):
        assert torch.equal(alone[0], one[7])


def test_no_sequences_have_no_outputs() -> None:
    layer = Layer(SHAPES[0], "delta", "head")
    pages = torch.zeros(0, 1, dtype=torch.int32)
    memory, rows = torch.zeros(1, 1 << 16, dtype=torch.uint8), torch.zeros(0, 1, dtype=torch.int64)
    row = torch.zeros(0, layer.size)
    outputs = layer.step.empty_outputs(row)
    out = layer.step.compute(row, rows, Blocks(memory, pages, pages, 0, layer.conv[0].numel() * 4), outputs)
    assert out.shape == (0, 128)


def test_what_does_not_fit_is_refused() -> None:
    layer = Layer(SHAPES[0], "delta", "head")
    row, memory = torch.zeros(1, layer.size), torch.zeros(2, 1 << 16, dtype=torch.uint8)
    pages, rows = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int64)

    def compute(row: torch.Tensor, rows: torch.Tensor, blocks: Blocks) -> None:
        layer.step.compute(row, rows, blocks, layer.step.empty_outputs(row))

    for wrong in (2, -1):
        for blocks in (Blocks(memory, pages, pages + wrong, 0, 4096), Blocks(memory, pages + wrong, pages, 0, 4096)):
            with pytest.raises(ValueError, match="pages that are not among the 2"):
                compute(row, rows, blocks)
        with pytest.raises(ValueError, match="rows that are not among the 1"):
            compute(row, rows + wrong, Blocks(memory, pages, pages, 0, 4096))
    for blocks in (Blocks(memory, pages, pages, 0, 1 << 16), Blocks(memory, pages, pages[:0], 0, 4096)):
        with pytest.raises(ValueError, match="do not fit blocks"):
            compute(row, rows, blocks)
    with pytest.raises(ValueError, match="rows of 9"):
        compute(row[:, :9], rows, Blocks(memory, pages, pages, 0, 4096))
    with pytest.raises(TypeError, match="float32"):
        compute(row.half(), rows, Blocks(memory, pages, pages, 0, 4096))
    for state, kept in (((4, 16, 31), 4), ((3, 16, 32), 4), ((4, 16, 32), 2), ((4, 16, 32), 65)):
        with pytest.raises(ValueError, match="do not fit a state"):
            RecurrentStep(layer.weights, layer.places, state, kept)
