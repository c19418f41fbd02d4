"""The check of the kernels that compute recurrent layers."""

from collections.abc import Iterator

import torch
from pagewise_kernels.recurrent import CHUNK, BlockStates, ChunkPlan, ShortConvolution, convolve_short, recur

from pagewise_executor.kernel_checks.compared import TOLERANCE, Compared
from pagewise_executor.kernel_checks.use import KernelUse
from pagewise_executor.models.recurrent import CONV, RECURRENT, StateKey
from pagewise_executor.models.triton_recurrence import kernels_of

_LONG = CHUNK + 6
"""Tokens of a sequence that begins, in two chunks; another sequence continues with one token."""
_STEPS = 4
"""Rounding adds up over the tokens of a sequence: so many times the tolerance of one result is allowed."""


def recurrent_layers(use: KernelUse) -> Iterator[Compared]:
    """A sequence with one token, which has a state, and another one that begins with several tokens."""
    tolerance = _STEPS * TOLERANCE[use.dtype]
    for plain in use.recurrent:
        layer = kernels_of(plain, use.device)
        projected = use.draw(1 + _LONG, layer.size)
        chunks = [0, 1, 0, 0, 0, 1, 1, 1 + CHUNK, -1, -1, 1, 0, 1 + CHUNK, 1 + _LONG, -1, 1, 1, 0]
        counts, firsts, of_chunks = (use.ints(*each, dtype=torch.int32) for each in ([1 + _LONG], [0, 1, 3], chunks))
        plan = ChunkPlan(counts, firsts, of_chunks.view(3, -1), longer=True)
        shapes: list[tuple[StateKey, tuple[int, ...], torch.dtype]] = []
        shapes.append(((CONV, 0), (len(layer.conv), plain.kept), use.dtype))
        if plain.state is not None:
            shapes.append(((RECURRENT, 0), plain.state, torch.float32))
        held = {key: use.draw(2, *shape).to(dtype) for key, shape, dtype in shapes}
        expected = {key: state.float().cpu() for key, state in held.items()}
        states = [_in_pages(use, state) for state in held.values()]
        if isinstance(layer, ShortConvolution):
            found = convolve_short(layer, projected, plan, states[0])
        else:
            found = recur(layer, projected, plan, *states)
        rows, at = projected.float().cpu(), 0
        for number, size in enumerate((1, _LONG)):
            own = {key: state[number : number + 1] for key, state in expected.items()}
            wanted = plain.compute(rows[None, at : at + size], own, begun=not number)[0]
            yield Compared(found[at : at + size].cpu(), wanted, tolerance)
            at += size
        for state, wanted in zip(states, expected.values(), strict=True):
            values = state.values.view(2, -1)[:, : wanted[0].numel()]
            for block in range(2):
                yield Compared(values[block].float().cpu(), wanted[block].flatten(), tolerance)


def _in_pages(use: KernelUse, state: torch.Tensor) -> BlockStates:
    memory = state.flatten(1).clone().view(torch.uint8)
    return BlockStates(memory, use.ints(0, 1, dtype=torch.int32)[:, None], 0, state.dtype)
