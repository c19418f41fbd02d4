"""Decodes that share a prefix read it together: in one launch, with the results that each would get alone."""

import dataclasses

import numpy as np
import pytest
import torch
from pagewise_kernels.attention import DecodePlan, decode_attention
from pagewise_kernels.attention.sharing import no_shared, shared_table

from tests.kernels.paged_case import SMALL, TOLERANCE, Case

Groups = list[tuple[list[int], int]]
"""Members of a group, and the tokens at the beginning of their contexts that lie in the same blocks."""


def share_blocks(case: Case, groups: Groups) -> None:
    for members, tokens in groups:
        case.tables[members, : tokens // case.block_size] = case.tables[members[0], : tokens // case.block_size].clone()


def share(plan: DecodePlan, groups: Groups) -> None:
    prefixes, members = [], []
    for queries, tokens in groups:
        prefixes.append((len(members), len(queries), tokens))
        members += queries
    plan.share(np.array(prefixes, np.int64).reshape(-1, 3), np.array(members, np.int64))


def check(case: Case, plan: DecodePlan, q: torch.Tensor) -> None:
    rows = torch.arange(len(case.lengths), dtype=torch.int32, device=q.device).flip(0)
    plan.plan(torch.tensor(case.lengths, dtype=torch.int32, device=q.device), rows)
    result = decode_attention(  # tables stand in another order than queries
        q, case.layer, case.tables.flip(0), plan, softcap=case.softcap, scale=case.scale, sinks=case.sinks
    )
    for row, length in enumerate(case.lengths):
        expected = case.expected(q[row : row + 1], row, length - 1) if length else torch.zeros_like(result[:1]).double()
        tolerance = TOLERANCE[case.dtype]
        torch.testing.assert_close(result[row : row + 1].double(), expected, atol=tolerance, rtol=tolerance)
    assert not plan.parts.arrivals.any()


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "name",
    ["plain", "group of 3", "softcap", "sinks", "heads before tokens", pytest.param("fp8", marks=pytest.mark.long)],
)
def test_shared_prefixes_equal_the_oracle(name: str) -> None:
    """As short as they may be in the interpreter; on a GPU only longer ones are shared."""
    case = dataclasses.replace(SMALL[name], lengths=(70, 41, 5, 66, 90, 33, 65, 1, 0), block_size=8)
    case.pool(torch.device("cpu"))
    check_steps(case, [([0, 3, 4], 64), ([5, 1, 6], 32)])


def check_steps(case: Case, groups: Groups) -> None:
    """Both groups share in one step, the first one in the next, none after that."""
    share_blocks(case, groups)
    plan, q = case.decode_plan(), case.queries(len(case.lengths))
    assert plan.can_share
    share(plan, groups)
    assert int(plan._shared[0]) >= len(groups)
    check(case, plan, q)
    first = plan.units.clone()
    share(plan, groups[:1])  # the same buffers in the next step
    check(case, plan, q)
    share(plan, [])
    check(case, plan, q)
    assert not torch.equal(plan.units, first)


def test_more_queries_than_fit_a_tile_share_in_several_stretches() -> None:
    members = np.array([3, 0, 8, 5, 7], np.int64)
    table = shared_table(np.array([(0, 5, 100)]), members, 9, at_once=2, tile=16, least=32)
    number, *rest = table.tolist()
    item_of, order, firsts, sizes, tokens = np.array(rest).reshape(5, 9).tolist()
    assert number == 2
    assert order[:5] == members.tolist()
    alone = [query for query in members.tolist() if item_of[query] == -1]
    assert len(alone) == 1
    for item in range(number):
        own = order[firsts[item] : firsts[item] + sizes[item]]
        assert len(own) == 2
        assert all(item_of[query] == item for query in own)
        assert tokens[item] == 96
    short = shared_table(np.array([(0, 5, 47)]), members, 9, at_once=2, tile=16, least=48)
    assert [short[0], short[1:10].tolist()] == [0, no_shared(9)[1:10].tolist()]


def test_queries_that_cannot_be_are_refused() -> None:
    for members in ([0, 1, 1], [0, 9], [-1, 2]):
        with pytest.raises(ValueError, match="different queries below 9"):
            shared_table(np.array([(0, 2, 64)]), np.array(members), 9, at_once=2, tile=16, least=16)


def test_fewer_queries_than_share_are_refused(device: torch.device) -> None:
    """Else the stretch of some would not be computed, and their results be wrong."""
    case = dataclasses.replace(SMALL["plain"], lengths=(300,) * 8, block_size=8)
    case.pool(device)
    plan = case.decode_plan()
    share(plan, [([0, 2, 3, 6], 256)])
    lengths = torch.full((8,), 300, dtype=torch.int32, device=device)
    plan.plan(lengths[:7])
    with pytest.raises(ValueError, match="query 6 shares a prefix, and there are only 6 queries"):
        plan.plan(lengths[:6])
    share(plan, [])
    plan.plan(lengths[:3])


def test_plans_that_cannot_share_do_not(device: torch.device) -> None:
    case = dataclasses.replace(SMALL["plain"], window=20)
    case.pool(device)
    windowed, in_order = case.decode_plan(), SMALL["plain"]
    in_order.pool(device)
    for plan in (windowed, in_order.decode_plan(deterministic=True)):
        assert not plan.can_share
        share(plan, [([1, 3], 32)])
        assert plan.order is None
    check(case, windowed, case.queries(len(case.lengths)))


@pytest.mark.gpu
def test_shared_prefixes_on_a_gpu(device: torch.device) -> None:
    case = Case(32, 8, 128, 16, tuple(1500 + 37 * i for i in range(40)), dtype=torch.bfloat16)
    case.pool(device)
    check_steps(case, [(list(range(0, 40, 2)), 1024), ([1, 5, 9, 13], 512)])
