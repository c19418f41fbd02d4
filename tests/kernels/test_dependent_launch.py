"""Kernels that begin while the one before them ends compute the same as one after the other, bit for bit.

In the interpreter and before compute capability 9.0 nothing begins early: there it is seen that the steps run.
"""

from collections.abc import Callable, Iterator

import pytest
import torch
from pagewise_kernels.launch import begins_early, interpreted, use_dependent_launch
from pagewise_kernels.rms_norm import rms_norm

from tests.kernels.decode_steps import DecodeSteps

REAL = [pytest.param(True, marks=pytest.mark.gpu), False]
BOTH_WAYS = (False, True)


@pytest.fixture(autouse=True)
def dependent_launch() -> Iterator[None]:
    yield
    use_dependent_launch(True)


def recorded(call: Callable[[], None]) -> Callable[[], None]:
    """The launches of ``call`` as a CUDA graph. It is called twice before."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def decoded(device: torch.device, early: bool, steps: int, real: bool, in_graph: bool) -> list[torch.Tensor]:
    """Tokens [steps, batch], keys and values after these steps."""
    use_dependent_launch(early)
    decoder = DecodeSteps(device, real=real, most_steps=steps + 8)
    tokens = torch.zeros_like(decoder.step())

    def step() -> None:
        tokens.copy_(decoder.step())

    run = recorded(step) if in_graph else step
    found = []
    for _ in range(steps):
        run()
        found.append(tokens.clone())
    return [torch.stack(found), decoder.keys, decoder.values]


@pytest.mark.parametrize("real", REAL)
@pytest.mark.parametrize("in_graph", [pytest.param(True, marks=pytest.mark.gpu), False])
def test_many_decode_steps_are_the_same_bits(in_graph: bool, real: bool, device: torch.device) -> None:
    apart, early = (decoded(device, way, 200 if real else 1, real, in_graph) for way in BOTH_WAYS)
    assert len(apart[0].unique()) > 1
    for one, other in zip(apart, early, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("real", REAL)
@pytest.mark.parametrize("in_graph", [pytest.param(True, marks=pytest.mark.gpu), False])
def test_what_the_kernel_before_has_written_is_seen(in_graph: bool, real: bool, device: torch.device) -> None:
    """Also weights, which are prefetched, and results that are overwritten two kernels later."""
    rows, size, turns = (3000, 2048, 200) if real else (3, 40, 2)

    def chained(early: bool) -> list[torch.Tensor]:
        use_dependent_launch(early)
        generator = torch.Generator().manual_seed(3)
        a, b, residual = (torch.randn(rows, size, generator=generator).to(device, torch.bfloat16) for _ in range(3))
        weight, other = (torch.ones(1, size, dtype=torch.bfloat16, device=device) for _ in range(2))
        base = torch.randn(1, size, generator=generator).to(device, torch.bfloat16)

        def turn() -> None:
            rms_norm(base, other[0], 1e-5, out=weight)
            rms_norm(a, weight[0], 1e-5, residual=residual, out=b)
            rms_norm(base, weight[0], 1e-5, out=other)
            rms_norm(b, other[0], 1e-5, out=a)
            base.add_(a[rows // 2 : rows // 2 + 1], alpha=0.25)

        run = recorded(turn) if in_graph else turn
        for _ in range(turns):
            run()
        return [a, b, residual, weight, other]

    for one, other in zip(*(chained(way) for way in BOTH_WAYS), strict=True):
        assert one.isfinite().all()
        assert torch.equal(one, other)


def test_nothing_begins_early_where_it_cannot(device: torch.device) -> None:
    capable = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    assert begins_early(device) == (capable and not interpreted())
    use_dependent_launch(False)
    assert not begins_early(device)
