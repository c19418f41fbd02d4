"""Drafts by a model that comes with the served one: it runs behind each step that a plan asks to.

First it takes the tokens that the step has computed and that their rows keep, all rows in one pass. Then it
continues each row from its own drafts, one token per pass, again all rows together. The KV that it computes for drafts
is overwritten when the tokens at their positions are known.

Drafts are drawn as tokens are: from the draft model's logits, with the row's constraints, temperature and seed, and
the random numbers of the token's position. So a draft of a random token is right as often as the two models give this
token when they draw with the same random numbers, and not only if the token is the likeliest.

With several ranks all compute the same passes. Rank 0, which alone samples, draws, and sends the others the tokens.
"""

from typing import NamedTuple

import numpy as np
import torch

from pagewise_executor.attention.backend import PagedLayer
from pagewise_executor.collectives import Ranks
from pagewise_executor.forward_pass import ForwardPass
from pagewise_executor.grouped_batch import GroupedBatch
from pagewise_executor.input_batch import InputBatch
from pagewise_executor.models.draft_model import DraftModel
from pagewise_executor.sampling.sampler import Sampler
from pagewise_executor.step_work import Chunk, Int64s, StepWork
from pagewise_executor.uploads import Uploads

NOTHING = -1
"""Fills the places behind a draft that is shorter than asked for."""


class _Taken(NamedTuple):
    """The tokens of one row that a step has computed and the row keeps: ``size`` from position ``start`` on, which lie
    in the flat batch from ``offset`` on.

    ``known``: the tokens behind them that the host knows [size]. ``drawn``: the number of the last of these that the
    step has sampled instead, of which the first is token ``sampled`` of the step.
    """

    row: int
    start: int
    size: int
    offset: int
    known: Int64s
    drawn: int
    sampled: int


class Proposer:
    """Drafts by ``draft``, over the KV pool of ``forward_pass``, on one of ``ranks``."""

    def __init__(self, draft: DraftModel, forward_pass: ForwardPass, device: torch.device, ranks: Ranks) -> None:
        self._draft, self._forward_pass, self._upload, self._ranks = draft, forward_pass, Uploads(device), ranks

    def begin(self, work: StepWork, batch: InputBatch) -> None:
        """Prepare for a step: keep its hidden states if drafts are to be proposed behind it.

        In the blocks that the step begins, the KV of the draft model becomes zeros, because it may never be written
        there. The page of such a block may hold bits of another group of layers that are no numbers. All drafts of the
        sequence would be made of these.
        """
        self._draft.watch(bool(work.proposals))
        if not isinstance(batch, GroupedBatch):
            return
        rows, positions = batch.flat_batch(work)
        begun = positions % batch.block_size == 0
        if begun.any():
            layer = self._draft.attention.paged_layer
            assert isinstance(layer, PagedLayer)
            tables = batch.slots[layer.slot].block_tables
            pages = self._upload(tables[rows[begun], positions[begun] // batch.block_size].astype(np.int64))
            for part in (layer.keys, layer.values, *(layer.scales or ())):
                part.view(torch.uint8).index_fill_(0, pages, 0)

    def propose(self, work: StepWork, batch: InputBatch, tokens: torch.Tensor, sampler: Sampler) -> torch.Tensor:
        """Take the tokens of a step that has been sampled, and is not counted yet; return the drafts that it asks for:
        int64 [proposals, most of them], on the device, with ``NOTHING`` in the places of no tokens.

        ``tokens`` int64: of the step, on the device.
        """
        taken = _taken(work, batch)
        found = [taken[row] for row, _ in work.proposals]
        asked = [count for _, count in work.proposals]
        counts = np.array([self._room(one, count, batch) for one, count in zip(found, asked, strict=True)])
        rows, last = np.array([(one.row, one.start + one.size - 1) for one in found], np.int64).T
        drafts = torch.full((len(found), max(asked)), NOTHING, dtype=torch.int64, device=tokens.device)
        hidden = self._take(found, tokens)
        # Each row with drafts continues from its last entry of the pass that has taken the tokens; ``at``: these rows.
        at, number = np.flatnonzero(counts), 0
        hidden = hidden[self._upload(np.cumsum([one.size for one in found])[at] - 1)]
        while len(at):
            positions = last[at] + 2 + number
            on_device, there, put = self._upload.together(rows[at].astype(np.int32), positions, at)
            logits = self._draft.logits(hidden)  # on all ranks: the logits of the model's head are gathered
            if self._ranks.first:
                ids = sampler.draft(logits, rows[at].tolist(), there, on_device)
            else:
                ids = torch.empty(len(at), dtype=torch.int64, device=tokens.device)
            ids = ids if self._ranks.alone else self._ranks.share_tokens(ids)
            drafts[put, number] = ids
            number += 1
            goes_on = np.flatnonzero(counts[at] > number)
            if len(goes_on):
                chosen = self._upload(goes_on)
                hidden = self._compute(rows[at[goes_on]], last[at[goes_on]] + number, ids[chosen], hidden[chosen])
            at = at[goes_on]
        sampler.end_drafts()
        return drafts

    def _room(self, one: _Taken, count: int, batch: InputBatch) -> int:
        """Return how many of ``count`` tokens can be drafted: all but the first need a slot behind the known tokens."""
        slots = int(min(batch.num_blocks[one.row] * batch.block_size, batch.limits[one.row]))
        return min(count, max(1, slots - (one.start + one.size - 1)))

    def _take(self, found: list[_Taken], tokens: torch.Tensor) -> torch.Tensor:
        """Compute the entries of the tokens that the step has computed; return their hidden states."""
        chunks = [Chunk(one.row, one.start, one.size, completes=False) for one in found]
        positions = np.concatenate([np.arange(one.start, one.start + one.size) for one in found])
        flat = np.concatenate([np.arange(one.offset, one.offset + one.size) for one in found])
        ends = np.cumsum([one.size for one in found])
        put = np.concatenate([np.arange(end - one.drawn, end) for one, end in zip(found, ends, strict=True)])
        drawn = np.concatenate([np.arange(one.sampled, one.sampled + one.drawn) for one in found])
        ids, positions_there, flat_there, put_there, drawn_there = self._upload.together(
            np.concatenate([one.known for one in found]), positions, flat, put, drawn
        )
        ids[put_there] = tokens[drawn_there]
        self._forward_pass.attend_behind(chunks)
        return self._draft.forward(ids, self._draft.states(flat_there), positions_there)

    def _compute(self, rows: Int64s, positions: Int64s, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Compute one entry of each row; return their hidden states."""
        places = zip(rows.tolist(), positions.tolist(), strict=True)
        self._forward_pass.attend_behind([Chunk(row, start, 1, completes=False) for row, start in places])
        return self._draft.forward(ids, hidden, self._upload(positions))


def _taken(work: StepWork, batch: InputBatch) -> dict[int, _Taken]:
    """Return the tokens that a step has computed, by row."""
    decodes = len(work.decoding)
    starts = batch.num_computed[work.decoding].tolist()
    one = np.zeros(1, np.int64)
    found = {row: _Taken(row, starts[i], 1, i, one, 1, i) for i, row in enumerate(work.decoding.tolist())}
    sampled = decodes
    accepted = iter(work.drafts)
    for offset, chunk in work.chunk_offsets():
        row, start, stop = chunk.row, chunk.start, chunk.start + chunk.size
        if chunk.drafted:
            size = 1 + next(accepted).num_accepted
            found[row] = _Taken(row, start, size, offset, np.zeros(size, np.int64), size, sampled)
        else:
            known = batch.sequences[row].tokens[start + 1 : stop + 1].astype(np.int64)
            known = np.append(known, one) if chunk.completes else known
            found[row] = _Taken(row, start, chunk.size, offset, known, int(chunk.completes), sampled)
        sampled += chunk.num_sampled
    return found
