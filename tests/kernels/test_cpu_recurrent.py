"""One token of recurrent layers in C against oracles in float64 and transformers' functions, in every build."""

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from pagewise_kernels.cpu.recurrent import Blocks, Places, RecurrentStep, Weights
from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_selective_state_update
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

pytestmark = pytest.mark.usefixtures("build")


class Shape(NamedTuple):
    """``kept``: inputs of a channel in a conv state; ``page``: bytes."""

    sequences: int
    heads: int
    groups: int
    key: int
    value: int
    width: int
    kept: int
    page: int


# Whole and cut vectors and columns, conv states of each kind, and pages that cut states anywhere.
SHAPES = [
    Shape(1, 4, 2, 16, 32, 4, 4, 1 << 16),
    Shape(3, 6, 3, 20, 13, 4, 3, 1000),
    Shape(16, 8, 8, 64, 128, 4, 4, 4096),
    Shape(5, 2, 1, 128, 64, 2, 5, 12345),
    Shape(2, 3, 1, 7, 100, 3, 2, 36),
]


class Layer:
    """A layer with random weights, and the states of sequences before a token."""

    def __init__(self, shape: Shape, *, delta: bool, norm: str, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.shape, self.delta, self.norm = shape, delta, norm
        heads, inner = shape.heads, shape.heads * shape.value
        channels = inner + 2 * shape.groups * shape.key
        self.size = channels + inner + 2 * heads
        conv, gate, decay, beta, _ = torch.randperm(self.size + 5).split([channels, inner, heads, heads, 5])
        self.places = Places(conv=conv, gate=gate, decay=decay, beta=beta if delta else None)
        size = {"head": shape.value, "all": inner}.get(norm, 1)
        weight = torch.randn(inner) if norm != "none" else None
        if norm == "head":
            weight = torch.randn(shape.value).repeat(heads)
        self.weights = Weights(
            conv=torch.randn(channels, shape.width), conv_bias=torch.randn(channels) if norm != "head" else None,
            a_log=torch.rand(heads).mul(16).log(), dt_bias=torch.randn(heads),
            skip=None if delta else torch.randn(heads), norm=weight, norm_size=size, gate_first=norm == "all", eps=1e-5,
            beta_scale=2.0 if norm == "all" else 1.0,
        )  # fmt: skip
        self.state_shape = (heads, shape.key, shape.value) if delta else (heads, shape.value, shape.key)
        self.step = RecurrentStep(self.weights, self.places, self.state_shape, shape.kept)
        self.conv = torch.randn(shape.sequences, channels, shape.kept)
        self.state = torch.randn(shape.sequences, *self.state_shape)

    def expected(self, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Outputs, conv states and states in float64."""
        shape, weights, places, row = self.shape, self.weights, self.places, row.double()
        held = torch.cat([self.conv.double(), row[:, places.conv, None]], dim=2)
        mixed = (held[..., -shape.width :] * weights.conv.double()).sum(2)
        mixed = F.silu(mixed + (0 if weights.conv_bias is None else weights.conv_bias.double()))
        dt = F.softplus(row[:, places.decay] + weights.dt_bias)
        decay = torch.exp(-weights.a_log.double().exp() * dt)
        inner, keys = shape.heads * shape.value, shape.groups * shape.key
        repeated = shape.heads // shape.groups

        def per_head(x: torch.Tensor) -> torch.Tensor:
            return x.view(len(x), shape.groups, shape.key).repeat_interleave(repeated, dim=1)

        if self.delta:
            assert places.beta is not None
            query, key = (per_head(x) for x in mixed[:, : 2 * keys].split(keys, dim=1))
            query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
            value = mixed[:, 2 * keys :].view(-1, shape.heads, shape.value)
            beta = weights.beta_scale * row[:, places.beta].sigmoid()
            state = self.state.double() * decay[..., None, None]
            delta = beta[..., None] * (value - torch.einsum("nhkv,nhk->nhv", state, key))
            state = state + key[..., None] * delta[..., None, :]
            out = torch.einsum("nhkv,nhk->nhv", state, query) / shape.key**0.5
        else:
            assert weights.skip is not None
            value, key, query = mixed.split([inner, keys, keys], dim=1)
            value, key, query = value.view(-1, shape.heads, shape.value), per_head(key), per_head(query)
            state = self.state.double() * decay[..., None, None]
            state = state + (dt[..., None] * value)[..., None] * key[..., None, :]
            out = torch.einsum("nhvk,nhk->nhv", state, query) + weights.skip.double()[:, None] * value
        return self._normed(out.flatten(1), F.silu(row[:, places.gate])), held[..., -shape.kept :], state

    def _normed(self, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        weights = self.weights
        out = out * gate if weights.gate_first else out
        if weights.norm is not None:
            parts = out.unflatten(1, (-1, weights.norm_size))
            parts = parts / (parts.square().mean(-1, keepdim=True) + weights.eps).sqrt()
            out = parts.flatten(1) * weights.norm
        return out if weights.gate_first else out * gate

    def found(self, row: torch.Tensor, *, apart: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Outputs, conv states and states by the operation; ``apart``: it writes other blocks than it reads."""
        count, page = len(row), self.shape.page
        starts = 12, 12 + self.conv[0].numel() * 4 + 8
        bytes_per_block = starts[1] + self.state[0].numel() * 4
        per_block = -(-bytes_per_block // page)
        memory = torch.randint(0, 256, (2 * count * per_block + 3, page), dtype=torch.uint8)
        pages = torch.randperm(len(memory))[: 2 * count * per_block].int().view(2, count, per_block)
        read, written = pages if apart else (pages[0], pages[0])
        content = torch.zeros(count, per_block * page, dtype=torch.uint8)
        for start, state in zip(starts, (self.conv, self.state), strict=True):
            raw = state.flatten(1).contiguous().view(torch.uint8)
            content[:, start : start + raw.shape[1]] = raw
        memory[read] = content.view(count, per_block, page)
        before = memory.clone()
        out = self.step.outputs(row, Blocks(memory, read, written, *starts))
        after, results = memory[written].flatten(1), []
        for start, state in zip(starts, (self.conv, self.state), strict=True):
            part = after[:, start : start + state[0].numel() * 4].contiguous()
            results.append(part.view(torch.float32).view(state.shape))
        others = torch.ones(len(memory), dtype=torch.bool)
        others[written.flatten()] = False
        assert torch.equal(memory[others], before[others])
        kept = memory[written].flatten(1)
        old = before[written].flatten(1)
        assert torch.equal(kept[:, : starts[0]], old[:, : starts[0]])
        assert torch.equal(kept[:, bytes_per_block:], old[:, bytes_per_block:])
        return out, *results


@pytest.mark.parametrize("norm", ["head", "all", "none"])
@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_token_is_computed_as_the_oracle_does(shape: Shape, delta: bool, norm: str) -> None:
    layer = Layer(shape, delta=delta, norm=norm)
    row = torch.randn(shape.sequences, layer.size + 5)
    expected = layer.expected(row)
    for apart in (True, False):
        out, conv, state = layer.found(row, apart=apart)
        assert torch.equal(conv.double(), expected[1])
        torch.testing.assert_close(state.double(), expected[2], atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(out.double(), expected[0], atol=1e-4, rtol=1e-4)


def test_the_gated_delta_rule_is_that_of_transformers() -> None:
    shape = SHAPES[2]
    layer = Layer(shape, delta=True, norm="none")
    row = torch.randn(shape.sequences, layer.size + 5)
    row[:, layer.places.gate] = 30.0
    out, conv, state = layer.found(row, apart=True)
    mixed = F.silu((conv * layer.weights.conv).sum(2) + layer.weights.conv_bias)  # type: ignore[operator]
    keys = shape.groups * shape.key
    query, key, value = mixed.split([keys, keys, shape.heads * shape.value], dim=1)
    expected, expected_state = torch_recurrent_gated_delta_rule(
        *(x.view(len(x), 1, shape.groups, shape.key) for x in (query, key)),
        value.view(-1, 1, shape.heads, shape.value),
        g=-layer.weights.a_log.exp() * F.softplus(row[:, None, layer.places.decay] + layer.weights.dt_bias),
        beta=row[:, None, layer.places.beta].sigmoid(), initial_state=layer.state, output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    torch.testing.assert_close(state, expected_state, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(out / 30, expected.flatten(1), atol=2e-5, rtol=1e-4)


def test_the_update_of_mamba_2_is_that_of_transformers() -> None:
    shape = SHAPES[2]
    layer = Layer(shape, delta=False, norm="none")
    row = torch.randn(shape.sequences, layer.size + 5)
    row[:, layer.places.gate] = 30.0
    out, conv, state = layer.found(row, apart=True)
    mixed = F.silu((conv * layer.weights.conv).sum(2) + layer.weights.conv_bias)  # type: ignore[operator]
    keys, sizes = shape.groups * shape.key, (shape.heads, shape.value)
    value, key, query = mixed.split([shape.heads * shape.value, keys, keys], dim=1)
    weights, expected_state = layer.weights, layer.state.clone()
    assert weights.skip is not None
    expected = mamba2_selective_state_update(
        expected_state, value.view(-1, *sizes), row[:, layer.places.decay, None].expand(-1, *sizes),
        -weights.a_log.exp()[:, None, None].expand(*sizes, shape.key),
        *(x.view(-1, shape.groups, shape.key) for x in (key, query)), weights.skip[:, None].expand(sizes),
        dt_bias=weights.dt_bias[:, None].expand(sizes), dt_softplus=True,
    )  # fmt: skip
    torch.testing.assert_close(state, expected_state, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(out / 30, expected.flatten(1), atol=1e-4, rtol=1e-4)


def test_a_sequence_has_the_same_output_with_others_beside_it() -> None:
    layer = Layer(SHAPES[2], delta=True, norm="head")
    row = torch.randn(16, layer.size + 5)
    together = layer.found(row, apart=True)
    layer.conv, layer.state = layer.conv[7:8], layer.state[7:8]
    for alone, one in zip(layer.found(row[7:8], apart=True), together, strict=True):
        assert torch.equal(alone[0], one[7])


def test_no_sequences_have_no_outputs() -> None:
    layer = Layer(SHAPES[0], delta=True, norm="head")
    pages = torch.zeros(0, 1, dtype=torch.int32)
    memory = torch.zeros(1, 1 << 16, dtype=torch.uint8)
    out = layer.step.outputs(torch.zeros(0, layer.size + 5), Blocks(memory, pages, pages, 0, layer.conv[0].numel() * 4))
    assert out.shape == (0, 128)


def test_what_does_not_fit_is_refused() -> None:
    layer = Layer(SHAPES[0], delta=True, norm="head")
    row, memory = torch.zeros(1, layer.size + 5), torch.zeros(2, 1 << 16, dtype=torch.uint8)
    pages = torch.zeros(1, 1, dtype=torch.int32)
    for wrong in (2, -1):
        with pytest.raises(ValueError, match="not among the 2"):
            layer.step.outputs(row, Blocks(memory, pages, pages + wrong, 0, 4096))
    for blocks in (Blocks(memory, pages, pages, 0, 1 << 16), Blocks(memory, pages, pages[:0], 0, 4096)):
        with pytest.raises(ValueError, match="do not fit the blocks"):
            layer.step.outputs(row, blocks)
    with pytest.raises(ValueError, match="rows of 9"):
        layer.step.outputs(row[:, :9], Blocks(memory, pages, pages, 0, 4096))
    with pytest.raises(TypeError, match="float32"):
        layer.step.outputs(row.bfloat16(), Blocks(memory, pages, pages, 0, 4096))
    for state, kept in (((4, 16, 31), 4), ((3, 16, 32), 4), ((4, 16, 32), 2), ((4, 16, 32), 65)):
        with pytest.raises(ValueError, match="do not fit a state"):
            RecurrentStep(layer.weights, layer.places, state, kept)
