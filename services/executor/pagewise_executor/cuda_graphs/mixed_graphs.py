"""Steps with prefill chunks by CUDA graphs: one graph for each of a ladder of numbers of tokens.

A graph computes the model up to its last norm for a flat batch of decodes and chunks, in any mixture. Each layer
launches attention twice: for decodes, whose contexts are split on the device, and for chunks, whose units are in a
static buffer that the host fills in each step; a grid of fixed size takes them in turns. Where a step has no decodes or
no chunks, there are no units. The head, which wants other tokens in each step, and sampling run behind the graph, as
they do in vLLM.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from pagewise_kernels.attention import Chunk, StaticPrefillPlan
from pagewise_kernels.attention.kernel import UNIT_FIELDS
from torch import nn

from pagewise_executor.adapters.triton_slots import TritonSlots
from pagewise_executor.attention.backend import ForwardContext
from pagewise_executor.attention.triton_attention import LayerKind, TritonBackend, TritonStep, chunks_of
from pagewise_executor.collectives import Ranks
from pagewise_executor.cuda_graphs.decode_graphs import DecodeGraphs
from pagewise_executor.cuda_graphs.graphed_steps import GraphedSteps, capture_graphs, sizes_up_to
from pagewise_executor.input_batch import InputBatch
from pagewise_executor.recurrent_plans import RecurrentPlans
from pagewise_executor.step_work import Int32s, Int64s, StepWork
from pagewise_executor.uploads import Array, Uploads

Head = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Token ids and positions [tokens], and the indices [n] of the tokens whose logits are wanted, to logits [n, vocab]."""

LARGEST = 1024
"""Tokens. Larger steps take the device longer than the host."""
LADDER = [16, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, LARGEST]
"""Up to about 256 tokens a step takes as long as reading the weights, so that padding costs little."""
_ALIGNED = 4
"""Parts of the buffer begin at multiples of so many int32: kernels are compiled for pointers divisible by 16 bytes."""
_NOTHING: Int64s = np.zeros(0, np.int64)


class ModelBody:
    """The decoder that the ``forward`` of ``model`` calls: from ids and positions to normalised hidden states.

    The number of logits differs from step to step, and the processing of logits differs from family to family: a
    softcap, or a scale. So the model's own code runs behind the graph, and gets the graph's output.
    """

    def __init__(self, model: nn.Module) -> None:
        body = model.get_decoder()  # type: ignore[operator] # not always the base model: OPT's is ``model.decoder``
        if body is model:  # Llama 4: the prefix of its base model names a module that it does not have
            body = model.model
        assert isinstance(body, nn.Module)
        self._forward = body.forward
        self._output: Any = None
        body.forward = self._run  # a module calls the ``forward`` of its instance

    def compute(self, ids: torch.Tensor, positions: torch.Tensor) -> Any:
        """Return the output of the body for a flat batch of ids and positions [tokens]."""
        return self._forward(input_ids=ids[None], position_ids=positions[None], use_cache=False)

    @contextmanager
    def computed(self, output: Any) -> Iterator[None]:
        """When the model is called inside, its body returns this output of ``compute``."""
        self._output = output
        try:
            yield
        finally:
            self._output = None

    def _run(self, *args: Any, **named: Any) -> Any:
        return self._output if self._output is not None else self._forward(*args, **named)


class _Inputs(NamedTuple):
    """The parts of a step's int32 inputs, on the host or on the device.

    ``rows``, ``lengths``, ``known``, ``positions`` [size]: of each token its row, its context with itself, its id or -1
    for the row's last token, and its place in the context; of padding: the row behind all others, 0, -1, -1.
    ``decodes`` [queries]: the lengths of decodes, -1 behind them. ``counts``, ``units``: of chunks, by kind of layers.
    """

    rows: Any
    lengths: Any
    known: Any
    positions: Any
    decodes: Any
    counts: list[Any]
    units: list[Any]


class _Size(NamedTuple):
    """The inputs of steps of one size, on the device, and the plans of their chunks."""

    inputs: _Inputs
    plans: dict[LayerKind, StaticPrefillPlan]


class MixedGraphs(GraphedSteps):
    """Runs steps of up to ``most_tokens`` tokens, at most LARGEST, from static buffers.

    ``body`` and ``head``: of the model. ``last_tokens``, ``adapters``, ``plans``: see ``DecodeGraphs``. ``runs``:
    whether steps run like this, by graphs or directly; it is true once their graphs have been captured.
    """

    name = "steps with prefill chunks"

    def __init__(
        self, body: ModelBody, head: Head, forward_context: ForwardContext, backend: TritonBackend,
        last_tokens: torch.Tensor, most_tokens: int, adapters: TritonSlots | None = None,
        plans: RecurrentPlans | None = None,
    ) -> None:  # fmt: skip
        super().__init__(sizes_up_to(min(most_tokens, LARGEST), LADDER), adapters)
        self._body, self._head, self._forward_context, self._backend = body, head, forward_context, backend
        self._last_tokens, self._plans = last_tokens, plans
        self._device, self._num_rows = last_tokens.device, len(last_tokens) - 1
        self._upload = Uploads(self._device)
        self._ids, self._positions = torch.zeros(2, self.sizes[-1], dtype=torch.int64, device=self._device)
        self._slots = backend.new_slots(self.sizes[-1])
        self._static: torch.Tensor | None = None
        self._kinds: list[LayerKind] = []
        self._by_size: dict[int, _Size] = {}
        # All graphs write their hidden states [1, tokens, hidden] here: each of them would keep the memory of its own.
        self._hidden: torch.Tensor | None = None
        self._outputs: dict[tuple[int, bool], Any] = {}
        self.runs = False

    def takes(self, work: StepWork) -> bool:
        """Whether ``run`` computes a step."""
        if not self.runs or work.num_tokens > self.sizes[-1]:
            return False
        if self._plans is None:
            return True
        return not work.drafts and self._plans.fits(self.sizes[bisect_left(self.sizes, work.num_tokens)])

    @property
    def least_without(self) -> int:
        """The tokens of the smallest step that ``run`` does not compute."""
        return self.sizes[-1] + 1 if self.runs else 1

    def allocate(self) -> None:
        """Run the largest step once. It allocates the memory that all sizes use."""
        size = self.sizes[-1]
        self.clear(size)
        self.use_adapters(size, uses=False)
        self._hidden = torch.empty_like(self.compute(size).last_hidden_state)

    def capture(self, pool: object, ranks: Ranks) -> object:
        """Capture the graphs: see ``GraphedSteps``. Steps run from the static buffers from then on."""
        if self._hidden is None:
            self.allocate()
        pool = super().capture(pool, ranks)
        self.runs = True
        return pool

    def drop(self) -> None:
        """Drop all graphs and their results."""
        super().drop()
        self._outputs.clear()
        self._hidden = None
        self.runs = False

    def warm_up(self) -> None:
        """Do nothing: they run like larger steps, whose kernels are compiled by chunks of several sizes."""

    def record(self, size: int, *, uses: bool) -> None:
        """Compute a step, and copy its hidden states to the memory that all graphs share."""
        assert self._hidden is not None
        output = self.compute(size)
        hidden = self._hidden[:, :size]
        hidden.copy_(output.last_hidden_state)
        self._outputs[size, uses] = type(output)(last_hidden_state=hidden)

    def clear(self, size: int) -> None:
        """Fill the inputs of a step with padding."""
        self._copy(size, torch.from_numpy(self._packed(size, _NOTHING, _NOTHING, _NOTHING, 0, [])))
        if self._plans is not None:
            self._plans.clear()

    def run(
        self, batch: InputBatch, work: StepWork, kept: Int64s, also: Sequence[Array] = ()
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Compute a step; arguments and results: see ``ForwardPass.compute``."""
        rows, positions = batch.flat_batch(work)
        count, decodes = len(rows), len(work.decoding)
        size = self.sizes[bisect_left(self.sizes, count)]
        self._backend.share_prefixes(rows[:decodes], positions[:decodes] + 1)
        known = np.full(count, -1)
        if work.chunks:
            known[decodes:] = batch.chunk_tokens(work)
        packed = self._packed(size, rows, positions, known, decodes, chunks_of(work))
        tables = self._backend.tables
        inputs, wanted, *there = self._upload.together(packed, kept, *also, *tables.take())
        tables.change(there[len(also) :])
        self._copy(size, inputs)
        if self._plans is not None:
            self._plans.begin_static(size, longer=True)
        uses = self.adapters is not None and self.adapters.begin_static(batch.adapters[rows], size)
        if (graph := self.graphs.get((size, uses))) is not None:
            graph.replay()
            output = self._outputs[size, uses]
        else:
            output = self.compute(size)
        with self._body.computed(output):
            return self._head(self._ids[:size], self._positions[:size], wanted), tuple(there[: len(also)])

    def compute(self, size: int) -> Any:
        """Compute a step from the static buffers; return the output of the body."""
        inputs, plans = self._size(size)
        ids, positions, slots = self._ids[:size], self._positions[:size], self._slots[:, :size]
        self._backend.fill_inputs(
            inputs.rows, inputs.lengths, self._last_tokens, ids, positions, slots, known=inputs.known
        )
        rows = inputs.rows[: len(inputs.decodes)]
        chunks = [Chunk(0, 0, size, self._num_rows)]  # that there are some: which, the plans know
        self._forward_context.step = TritonStep(
            self._backend, slots.unbind(), self._backend.tables.slots, inputs.decodes, rows, chunks,
            prefill_plans={**plans}, is_static=True,
        )  # fmt: skip
        if self._plans is not None:
            self._plans.use_static(size, longer=True)
        return self._body.compute(ids, positions)

    def _packed(
        self, size: int, rows: Int64s, positions: Int64s, known: Int64s, decodes: int, chunks: list[Chunk]
    ) -> Int32s:
        """Return the inputs of a step: of its tokens rows, positions and ids (-1: see ``_Inputs``) [tokens]."""
        plans = self._size(size).plans
        packed = np.empty(self._length(size), np.int32)
        into = self._parts(packed, size)
        for part, values, padding in (
            (into.rows, rows, self._num_rows),
            (into.lengths, positions + 1, 0),
            (into.known, known, -1),
            (into.positions, positions, -1),
            (into.decodes, positions[:decodes] + 1, -1),
        ):
            part[: len(values)], part[len(values) :] = values, padding
        for plan, count, units in zip(plans.values(), into.counts, into.units, strict=True):
            found = plan.units_of(chunks, (len(rows), size - len(rows)))
            count[0], units[: found.size] = len(found), found.ravel()
        return packed

    def _copy(self, size: int, packed: torch.Tensor) -> None:
        self._size(size)
        assert self._static is not None
        self._static[: len(packed)].copy_(packed)

    def _size(self, size: int) -> _Size:
        """Return the inputs and plans of steps of a size. All sizes share the memory of the inputs."""
        if (found := self._by_size.get(size)) is not None:
            return found
        if self._static is None:
            self._kinds = self._find_kinds()
            self._static = torch.zeros(self._length(self.sizes[-1]), dtype=torch.int32, device=self._device)
        inputs = self._parts(self._static, size)
        plans = {
            kind: StaticPrefillPlan(
                size,
                **kind._asdict(),
                unit_count=count,
                units=units,
                positions=inputs.positions,
                deterministic=self._backend.deterministic,
            )
            for kind, count, units in zip(self._kinds, inputs.counts, inputs.units, strict=True)
        }
        self._by_size[size] = made = _Size(inputs, plans)
        return made

    def _find_kinds(self) -> list[LayerKind]:
        """Return the kinds of layers there are, each of which has units of its own."""
        if not self._backend.kinds:
            nothing = torch.zeros(1, dtype=torch.int32, device=self._device)
            slots = self._slots[:, :1].fill_(-1)
            self._forward_context.step = self._backend.decode_step(slots, nothing, nothing)
            if self._plans is not None:
                self._plans.clear()
                self._plans.use_static(1, longer=False)
            self._body.compute(self._ids[:1], self._positions[:1])
        return list(self._backend.kinds)

    def _lengths(self, size: int) -> list[int]:
        """Return the lengths of the parts of the inputs. A step has at most one unit for each token."""
        return [*[size] * 4, min(size, self._num_rows), *[1, size * UNIT_FIELDS] * len(self._kinds)]

    def _length(self, size: int) -> int:
        return sum(_aligned(length) for length in self._lengths(size))

    def _parts(self, packed: Any, size: int) -> _Inputs:
        parts, begin = [], 0
        for length in self._lengths(size):
            parts.append(packed[begin : begin + length])
            begin += _aligned(length)
        rows, lengths, known, positions, decodes, *of_kinds = parts
        return _Inputs(rows, lengths, known, positions, decodes, of_kinds[::2], of_kinds[1::2])


class StepGraphs(NamedTuple):
    """``decodes``: steps of decodes alone. ``mixed``: steps with chunks, which the engine runs by them."""

    decodes: DecodeGraphs
    mixed: MixedGraphs

    def allocate(self, *, captures: bool) -> None:
        """Allocate the memory that all steps use, before the peak of the largest step is measured.

        ``captures``: graphs will be captured.
        """
        self.decodes.allocate()
        if captures:
            self.mixed.allocate()

    def memory(self, peak: int, tokens: int) -> int:
        """Return the bytes of device memory that all graphs share, beside the static buffers.

        ``peak``: the bytes that the largest step takes, which has so many ``tokens``.
        """
        return peak * min(tokens, self.mixed.sizes[-1]) // tokens

    @property
    def num_graphs(self) -> int:
        """How many graphs there will be."""
        return self.decodes.num_graphs + self.mixed.num_graphs

    def capture(self, ranks: Ranks) -> bool:
        """Capture the graphs with ``capture_graphs``; mixed steps, which take more memory, come first."""
        return capture_graphs(ranks, self.mixed, self.decodes)


def _aligned(length: int) -> int:
    return -(-length // _ALIGNED) * _ALIGNED
