"""Checks of the tokens, sampling parameters and copies of a plan.

They come before any use of these values as indices, because on a GPU an index out of range ends the whole process.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt
from pagewise_shared.block_hash import unpack_names
from pagewise_shared.errors import PagewiseError
from pagewise_shared.protocol import DEVICE, BlockCopies, NewSequence, StepPlan
from pagewise_shared.sampling import MAX_GRAMMAR_BYTES, SamplingParams, TokenConstraints

from pagewise_executor.block_copies import CopyJob, Pairs

ANY_TOKEN = 2**31
"""The size of the vocabulary for a runner that does not index with tokens."""

_MOST_TIERS = 128
_LARGEST, _SMALLEST = sys.float_info.max, sys.float_info.min
_RANGES = {
    "temperature": (0.0, _LARGEST),
    "top_p": (0.0, _LARGEST),
    "min_p": (0.0, _LARGEST),
    "top_k": (0, 2**31 - 1),
    "presence_penalty": (-_LARGEST, _LARGEST),
    "frequency_penalty": (-_LARGEST, _LARGEST),
    "repetition_penalty": (_SMALLEST, _LARGEST),
    "logprobs": (0, 2**16),
    "prompt_logprobs": (0, 2**16),
}
"""The least and the greatest value of sampling parameters."""


class InvalidPlanError(PagewiseError):
    """A plan contradicts the executor's state."""


def check_tokens(tokens: npt.NDArray[np.int32], num_prompt_tokens: int, vocab_size: int) -> None:
    """Check the known tokens of a sequence.

    Raises:
        InvalidPlanError: a token is outside the vocabulary, or the prompt is empty or longer than the tokens.
    """
    if len(tokens) and not (tokens.min() >= 0 and tokens.max() < vocab_size):
        raise InvalidPlanError(f"a sequence joins with a token outside the vocabulary of {vocab_size}")
    if not 1 <= num_prompt_tokens <= len(tokens):
        raise InvalidPlanError(f"{num_prompt_tokens} of {len(tokens)} tokens are the prompt's")


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Check the sampling parameters of a sequence.

    Raises:
        InvalidPlanError: a token is outside the vocabulary, or a number is not finite or out of range.
    """
    if len(params.grammar) > MAX_GRAMMAR_BYTES:
        raise InvalidPlanError(f"a grammar of {len(params.grammar)} characters")
    stop_ids = params.stop_token_ids
    if stop_ids and not (min(stop_ids) >= 0 and max(stop_ids) < vocab_size):
        raise InvalidPlanError(f"stop_token_ids: a token is outside the vocabulary of {vocab_size}")
    if params.thinking is not None and (error := params.thinking.error(vocab_size)) is not None:
        raise InvalidPlanError(error)
    for name, (least, most) in _RANGES.items():
        value = getattr(params, name)
        if value is not None and not least <= value <= most:  # a NaN is in no range
            raise InvalidPlanError(f"{name} is {value}, and not a number from {least:g} to {most:g}")


def with_constraints(new: NewSequence, constraints: Sequence[TokenConstraints]) -> SamplingParams:
    """Return the sampling parameters of a sequence with its token constraints, which its plan lists.

    Raises:
        InvalidPlanError: the plan has no such constraints, or the sequence brings its own.
    """
    if new.sampling.constraints is not None or not -1 <= new.constraints < len(constraints):
        raise InvalidPlanError(f"row {new.row} has constraints {new.constraints} of {len(constraints)}, or its own")
    if new.constraints < 0:
        return new.sampling
    return msgspec.structs.replace(new.sampling, constraints=constraints[new.constraints])


def check_constraints(constraints: Iterable[TokenConstraints], vocab_size: int) -> None:
    """Check the token constraints of a plan.

    Raises:
        InvalidPlanError: the text names the invalid field.
    """
    for one in constraints:
        if (error := one.error(vocab_size, _largest)) is not None:
            raise InvalidPlanError(error)


def _largest(packed: bytes) -> int:
    return int(np.frombuffer(packed, np.uint32).max(initial=0))


def checked_copies(plan: StepPlan, sizes: Sequence[Mapping[int, int]]) -> list[CopyJob]:
    """Return the copies of a plan, checked, as jobs.

    ``sizes``: for each group of layers the number of blocks of each tier of this executor, including the device; 0 for
    tiers whose blocks have names instead of ids. Blocks of a peer are not checked here but by the peer.

    Raises:
        InvalidPlanError: a group, a tier or a block does not exist, or a list does not consist of pairs.
    """
    jobs = []
    for copies in plan.copies:
        pairs, source, target = _pairs(copies), copies.source, copies.target
        if not 0 <= copies.group < len(sizes):
            raise InvalidPlanError(f"copies are in group {copies.group} of {len(sizes)}")
        num_blocks = sizes[copies.group]
        if refused := _error_of_route(copies, num_blocks):
            raise InvalidPlanError(refused)
        try:
            names = unpack_names(copies.names)
        except ValueError as error:
            raise InvalidPlanError(str(error)) from error
        if names and len(names) != len(pairs):
            raise InvalidPlanError(f"{len(names)} names are given to {len(pairs)} blocks")
        if not all(0 <= index < len(names) for index, _ in copies.salts):
            raise InvalidPlanError(f"salts are given to other blocks than the {len(names)} that have names")
        salts = {names[index].hash: tags for index, tags in copies.salts}
        if copies.peer is None:
            _check_blocks(pairs[:, 0], source, num_blocks[source] or len(names))
        _check_blocks(pairs[:, 1], target, num_blocks[target] or len(names))
        if len(pairs):
            where = plan.epoch, plan.step, source, target
            jobs.append(CopyJob(*where, pairs, copies.peer, names, copies.group, salts))
    return jobs


def _error_of_route(copies: BlockCopies, num_blocks: Mapping[int, int]) -> str:
    """Return why blocks cannot be copied between these two tiers; empty if they can."""
    source, target = copies.source, copies.target
    if copies.peer is not None:
        possible = target == DEVICE and not copies.names and 0 <= source < _MOST_TIERS
        return "" if possible else f"a peer's tier {source} cannot be copied to tier {target}"
    if source not in num_blocks or (target != DEVICE and (target <= source or not num_blocks[source])):
        return f"blocks cannot be copied from tier {source} to tier {target}"
    return "" if target in num_blocks else f"there is no tier {target}"


def _pairs(copies: BlockCopies) -> Pairs:
    if len(copies.pairs) % 8:
        raise InvalidPlanError(f"{len(copies.pairs)} bytes are not a list of pairs of blocks")
    return np.frombuffer(copies.pairs, np.int32).reshape(-1, 2)


def _check_blocks(blocks: npt.NDArray[np.int32], tier: int, num_blocks: int) -> None:
    if len(blocks) and not (blocks.min() >= 0 and blocks.max() < num_blocks):
        raise InvalidPlanError(f"copies go outside tier {tier}, which has {num_blocks} blocks")
