"""Attention to latents (MLA) against a float64 oracle: small odd shapes interpreted on the CPU, real ones on a GPU."""

import dataclasses
from dataclasses import dataclass

import pytest
import torch
from pagewise_kernels.attention import Chunk, DecodePlan, PrefillPlan, decode_latents, prefill_latents
from pagewise_kernels.attention.config import latent_groups
from pagewise_kernels.kv_layer import KVLayer
from pagewise_kernels.kv_write import write_kv

from tests.kernels import oracles
from tests.kernels.paged_case import TOLERANCE


@dataclass
class Case:
    """A pool with random latents. Sequence i has ``lengths[i]`` tokens of context; blocks lie in disorder."""

    heads: int = 4
    rotated: int = 16
    latent: int = 32
    block_size: int = 4
    lengths: tuple[int, ...] = (1, 5, 33, 70, 17)
    dtype: torch.dtype = torch.float32
    scale: float = 0.2

    def pool(self, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(1)
        most = -(-max(self.lengths) // self.block_size)
        num_blocks = len(self.lengths) * most + 3
        size = self.rotated + self.latent
        # Between other layers of a block, so that a vector too far to either side is another number.
        whole = torch.randn(num_blocks, self.block_size, 1, 3 * size, generator=generator).to(device, self.dtype)
        self.keys = whole[..., size : 2 * size]
        self.layer = KVLayer(self.keys, self.keys[..., self.rotated :])
        tables = torch.randperm(num_blocks, generator=generator)[: len(self.lengths) * most]
        self.tables = tables.view(len(self.lengths), most).to(device, torch.int32)

    def draw(self, count: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(2)
        q = torch.randn(count, self.heads, self.rotated + self.latent, generator=generator)
        return q.to(self.keys.device, self.dtype)

    def check(self, found: torch.Tensor, q: torch.Tensor, row: int, start: int) -> None:
        expected = oracles.attention(
            q, self.keys, self.keys[..., self.rotated :], self.tables[row], start, scale=self.scale
        )
        torch.testing.assert_close(found.double(), expected, atol=TOLERANCE[self.dtype], rtol=TOLERANCE[self.dtype])

    def of_plan(self) -> dict[str, object]:
        groups = latent_groups(self.heads, self.dtype.itemsize, self.keys.device)
        return {
            "heads": self.heads, "kv_heads": groups, "head_dim": self.latent, "rotated": self.rotated,
            "kv_dtype": self.dtype, "device": self.keys.device,
        }  # fmt: skip


CASES = {
    "plain": Case(),
    "one head": Case(heads=1, block_size=1),
    "groups of heads": Case(heads=40, lengths=(33, 18)),
    "odd sizes": Case(heads=5, rotated=8, latent=24, block_size=3),
    "bfloat16": Case(dtype=torch.bfloat16, heads=16, lengths=(40, 3)),
}
REAL = {
    "deepseek-v3": Case(128, 64, 512, 16, (1, 300, 4097), torch.bfloat16, 192**-0.5),
    "glm-4.7-flash": Case(20, 64, 512, 16, (1, 300, 4097), torch.bfloat16, 256**-0.5),
    "mistral-4 float32": Case(32, 64, 256, 16, (17, 900), torch.float32, 128**-0.5),
}


def check_decode(case: Case, device: torch.device) -> None:
    case.pool(device)
    q = case.draw(len(case.lengths) + 1)
    plan = DecodePlan(max_queries=len(q) + 2, **case.of_plan())  # type: ignore[arg-type]
    plan.plan(torch.tensor([*case.lengths, 0], dtype=torch.int32, device=device))
    out = torch.full((*q.shape[:2], case.latent), 7.0, dtype=case.dtype, device=device)
    decode_latents(q, case.layer, case.tables, plan, out=out, scale=case.scale)
    for row, length in enumerate(case.lengths):
        case.check(out[row : row + 1], q[row : row + 1], row, length - 1)
    assert not out[-1].any(), "a query that pads a batch gets zeros"


def check_prefill(case: Case, device: torch.device, most: int) -> None:
    case.pool(device)
    chunks, first = [], 1  # behind a decode
    for row, length in enumerate(case.lengths):
        size = min(length, most - row)
        chunks.append(Chunk(first, length - size, size, row))
        first += size
    q = case.draw(first)
    plan = PrefillPlan(chunks, **case.of_plan())  # type: ignore[arg-type]
    out = torch.full((*q.shape[:2], case.latent), 7.0, dtype=case.dtype, device=device)
    prefill_latents(q, case.layer, case.tables, plan, out=out, scale=case.scale)
    for chunk in chunks:
        own = slice(chunk.first, chunk.first + chunk.size)
        case.check(out[own], q[own], chunk.table, chunk.start)
    assert (out[0] == 7).all(), "only the rows of chunks are written"


@pytest.mark.parametrize("name", CASES)
def test_decode_equals_the_oracle(name: str, device: torch.device) -> None:
    check_decode(CASES[name], device)


@pytest.mark.parametrize("name", CASES)
def test_prefill_equals_the_oracle(name: str, device: torch.device) -> None:
    check_prefill(CASES[name], device, 21)


@pytest.mark.gpu
@pytest.mark.parametrize("name", REAL)
def test_real_shapes_equal_the_oracle(name: str, device: torch.device) -> None:
    check_decode(REAL[name], device)
    check_prefill(REAL[name], device, 400)


def test_a_latent_is_written_once(device: torch.device) -> None:
    case = Case(rotated=8, latent=24)
    case.pool(device)
    before = case.keys.clone()
    new = torch.randn(3, 1, 32, generator=torch.Generator().manual_seed(3)).to(device)
    write_kv(new, new[..., 8:], case.layer, torch.tensor([5, -1, 2], device=device))
    flat, kept = case.keys.flatten(0, 1), before.flatten(0, 1)
    assert torch.equal(flat[[5, 2]], new[[0, 2]])
    others = [slot for slot in range(len(flat)) if slot not in (5, 2)]
    assert torch.equal(flat[others], kept[others])


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    case = Case()
    case.pool(device)
    q = case.draw(2)
    plan = DecodePlan(max_queries=2, **case.of_plan())  # type: ignore[arg-type]
    plan.plan(torch.tensor([3, 3], dtype=torch.int32, device=device))
    with pytest.raises(ValueError, match="and out \\[queries, heads, 32\\]"):
        decode_latents(q, case.layer, case.tables, plan, out=torch.empty_like(q), scale=1.0)
    with pytest.raises(ValueError, match="keeps no latents"):
        decode_latents(q, KVLayer(case.keys, case.keys), case.tables, plan, out=q[..., 16:], scale=1.0)
    other = dataclasses.replace(case, heads=2)
    other.pool(device)
    with pytest.raises(ValueError, match="the plan is for 2 queries"):
        decode_latents(other.draw(2), other.layer, case.tables, plan, out=q[:, :2, 16:], scale=1.0)
