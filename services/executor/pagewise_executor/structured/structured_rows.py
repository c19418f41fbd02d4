"""The rows whose outputs have to match grammars: a matcher for each, and its mask for every token.

A mask depends on the tokens that were sampled before, which a GPU may not have computed yet when the next step is
issued. So masks are made as late as possible: behind the launch of a step's forward pass, which the device computes
during the wait for the tokens of the step before.

Behind each token of a draft, the mask is of a matcher that has consumed the tokens before it. The matcher goes back
when all masks are there, and consumes the tokens that its row keeps when they are known.
"""

import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from pagewise_shared.cpu_threads import available_cores
from pagewise_shared.model_files import resolve_model
from pagewise_shared.protocol import RowFailure
from pagewise_shared.sampling import num_accepted

from pagewise_executor.device_defaults import SizedConfig
from pagewise_executor.uploads import Uploads, to_host

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from pagewise_executor.structured.grammars import Grammars

log = logging.getLogger(__name__)

_MOST_THREADS = 8
"""Threads that compute masks for a GPU, which waits for them. On the CPU one is enough: the cores compute the model,
and 16 masks of a vocabulary of 113,000 tokens take half a millisecond."""
_MOST_COMPILERS = 4
"""Threads that compile grammars, likewise."""
_MORE_GRAMMARS = 256
"""Grammars that are kept compiled beside the rows' own: of sequences that are to join, or were preempted."""
_TOKEN_BYTES = 4
_MOST_LEFT = 128
"""Matchers of sequences that have left their rows, which are kept."""
_MAX_REASON = 300

Drafts = Mapping[int, Sequence[int]]
"""The tokens of drafts, by row."""
NO_DRAFTS: Drafts = MappingProxyType({})


@dataclass(slots=True, eq=False)
class StructuredRow:
    """A sequence with a grammar.

    Fields:
        grammar: its text. consumed: the output tokens that the matcher has been fed (int32 bytes).
        beam: it is a hypothesis of a beam search. Its sampled tokens are ignored, because the scheduler chooses the
            tokens of the next hypotheses.
        matcher: None until its first mask is needed. error: why there are no more masks; empty: there are.
        invalid: the grammar cannot be compiled for the model's tokenizer.
        ahead: how many tokens of a draft the matcher has consumed beside ``consumed``.
    """

    grammar: str
    consumed: bytearray
    beam: bool = False
    matcher: "LLMatcher | None" = None
    error: str = ""
    invalid: bool = False
    ahead: int = 0

    def consume(self, token: int) -> None:
        """Feed the matcher a sampled token."""
        if self.error or self.beam:
            return
        self.consumed += token.to_bytes(_TOKEN_BYTES, "little")
        if self.matcher is not None and not self.matcher.consume_token(token):
            self.fail(self.matcher.get_error())

    def go_ahead(self, token: int) -> bool:
        """Feed the matcher a token of a draft; return whether the grammar allows it, or the matcher has failed."""
        if self.matcher is None or self.error:
            return False
        goes_on = self.matcher.try_consume_tokens([token]) > 0 or self.matcher.is_error()
        self.ahead += goes_on
        return goes_on

    def go_back(self) -> None:
        """Let the matcher forget the tokens of a draft."""
        if self.matcher is not None and self.ahead and not self.matcher.rollback(self.ahead):
            self.matcher = None  # it has failed behind a token of the draft: the next mask is made by a new one
        self.ahead = 0

    def fail(self, reason: str) -> None:
        """Record that the grammar cannot be followed any further."""
        self.error = _reason(reason)


@dataclass(slots=True)
class _Drawn:
    """Sampled tokens on their way to the host. ``copied``: the event of their arrival; None: they are on the host.

    ``rows``: each with its draft, behind each of whose tokens one was sampled.
    """

    rows: list[tuple[StructuredRow, Sequence[int]]]
    tokens: torch.Tensor
    copied: "torch.cuda.Event | None"


@dataclass(slots=True)
class StructuredRows:
    """The rows of one executor that have grammars. ``grammars``: None if ``no_grammars`` has the reason why there are
    none."""

    grammars: "Grammars | None"
    no_grammars: str
    vocab_size: int
    device: torch.device
    _rows: dict[int, StructuredRow] = field(default_factory=dict)
    _left: deque[StructuredRow] = field(default_factory=lambda: deque(maxlen=_MOST_LEFT))
    _drawn: list[_Drawn] = field(default_factory=list)
    _failures: list[RowFailure] = field(default_factory=list)
    _upload: Uploads = field(init=False)

    def __post_init__(self) -> None:
        self._upload = Uploads(self.device)

    def join(self, row: int, grammar: str, output: bytes, *, beam: bool = False) -> None:
        """Take over a sequence that joins in ``row``.

        ``output``: the tokens behind its prompt (int32 bytes). ``beam``: it is a hypothesis of a beam search.
        """
        self._rows[row] = StructuredRow(grammar, bytearray(output), beam)
        if self.grammars is not None:
            self.grammars.prepare(grammar)
        else:
            self._rows[row].fail(self.no_grammars)

    def leave(self, row: int) -> None:
        """Forget the sequence in ``row``, which may have had no grammar. Its matcher is kept for a while, because the
        sequence, or a fork of it, may come back soon."""
        held = self._rows.pop(row, None)
        if held is not None and held.matcher is not None and not held.error:
            self._left.append(held)

    def forbidden(self, rows: Sequence[int], indices: Sequence[int], drafts: Drafts = NO_DRAFTS) -> torch.Tensor:
        """Return which tokens the grammars of ``rows`` [k] do not allow next: bool [k, vocab], on the device.

        ``indices`` [k]: of their tokens in the result of the step, for ``take_failures``. ``drafts``: a row with a
        draft of n tokens is 1 + n times among ``rows``, for the tokens behind its known ones and behind each of these.
        A row that has failed, or whose draft the grammar does not allow, is allowed one arbitrary token there, so that
        sampling works.
        """
        self._catch_up()
        masks = self._empty_masks(len(rows))
        going = [(number, self._rows[row], drafts.get(row, ())) for number, row in _first(rows, drafts)]
        place = 0
        while going:
            numbers = [number + place for number, _, _ in going]
            errors = self._fill([row for _, row, _ in going], masks, numbers)
            self._failures += [RowFailure(indices[numbers[one]], *why) for one, why in errors.items()]
            going = [
                (number, row, draft)
                for number, row, draft in going
                if place < len(draft) and row.go_ahead(draft[place])
            ]
            place += 1
        for row in drafts.keys() & self._rows.keys():
            self._rows[row].go_back()
        return forbidden_tokens(masks, self.vocab_size, self._upload)

    def forbidden_ahead(self, rows: Sequence[int]) -> torch.Tensor:
        """Return which tokens must not follow in drafts that are made for ``rows`` [k], as ``forbidden`` does.

        They follow the known tokens, and the tokens that ``go_ahead`` got since the last ``go_back``.
        """
        self._catch_up()
        masks = self._empty_masks(len(rows))
        self._fill([self._rows[row] for row in rows], masks, range(len(rows)))
        return forbidden_tokens(masks, self.vocab_size, self._upload)

    def go_ahead(self, rows: Sequence[int], tokens: torch.Tensor) -> None:
        """Continue drafts of ``rows`` by ``tokens`` int64 [k]; on a GPU this waits for them."""
        for row, token in zip(rows, tokens.tolist(), strict=True):
            self._rows[row].go_ahead(token)

    def go_back(self) -> None:
        """Forget the drafts that ``go_ahead`` has continued."""
        for row in self._rows.values():
            row.go_back()

    def drawn(self, rows: Sequence[int], tokens: torch.Tensor, drafts: Drafts = NO_DRAFTS) -> None:
        """Keep ``tokens`` int64 [k], which were sampled for these rows. They are read when masks are needed next.

        ``drafts``: as ``forbidden`` got them.
        """
        held = [(self._rows[row], drafts.get(row, ())) for _, row in _first(rows, drafts)]
        if self.device.type != "cuda":
            self._drawn.append(_Drawn(held, tokens, None))
            return
        on_host = to_host(tokens)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        self._drawn.append(_Drawn(held, on_host, copied))

    def take_failures(self) -> list[RowFailure]:
        """Return the rows that have failed since the last call, by the indices of their tokens, in their order."""
        failures, self._failures = self._failures, []
        return sorted(failures, key=lambda one: one.index)

    def _catch_up(self) -> None:
        for drawn in self._drawn:
            if drawn.copied is not None:
                drawn.copied.synchronize()
            tokens = iter(drawn.tokens.tolist())
            for row, draft in drawn.rows:
                found = list(islice(tokens, 1 + len(draft)))
                for token in found[: 1 + num_accepted(draft, found)]:
                    row.consume(token)
        self._drawn.clear()

    def _empty_masks(self, count: int) -> npt.NDArray[np.int32]:
        """Return masks [count, words] that allow token 0 alone."""
        masks = np.zeros((count, -(-self.vocab_size // 32)), np.int32)
        masks[:, 0] = 1
        return masks

    def _fill(
        self, rows: Sequence[StructuredRow], masks: npt.NDArray[np.int32], numbers: Sequence[int]
    ) -> dict[int, tuple[str, bool]]:
        """Write the masks of ``rows`` [k] to these numbers [k] of ``masks``, but for rows that fail.

        Returns, by their indices, why they fail, and whether their grammar is invalid.
        """
        errors: dict[int, tuple[str, bool]] = {}
        matchers = {index: matcher for index, row in enumerate(rows) if (matcher := self._matcher(row)) is not None}
        going = {numbers[index]: matcher for index, matcher in matchers.items() if not matcher.is_error()}
        if going and self.grammars is not None:
            masks[list(going)] = self.grammars.masks(list(going.values()))
        for index, matcher in matchers.items():
            if matcher.is_error():
                masks[numbers[index]] = self._empty_masks(1)
                if rows[index].ahead:  # it fails only if it keeps the tokens of the draft before
                    errors[index] = _reason(matcher.get_error()), False
                else:
                    rows[index].fail(matcher.get_error())
        return errors | {index: (row.error, row.invalid) for index, row in enumerate(rows) if row.error}

    def _matcher(self, row: StructuredRow) -> "LLMatcher | None":
        """Return the matcher of a row, up to date; None: it has failed."""
        if row.matcher is None and not row.error and self.grammars is not None:
            row.matcher = self._resumed(row) or self._replayed(row)
        return None if row.error else row.matcher

    def _resumed(self, row: StructuredRow) -> "LLMatcher | None":
        """Return a copy of the matcher of a sequence that has left with the same output, or with all of it but the last
        token, as the parent of a beam search's hypothesis has."""
        output = bytes(row.consumed)
        for left in reversed(self._left):
            if left.error or left.matcher is None or left.grammar != row.grammar:
                continue
            if left.consumed == output:
                return left.matcher.deep_copy()
            if output and left.consumed == output[:-_TOKEN_BYTES]:
                matcher = left.matcher.deep_copy()
                if matcher.consume_token(int.from_bytes(output[-_TOKEN_BYTES:], "little")):
                    return matcher
        return None

    def _replayed(self, row: StructuredRow) -> "LLMatcher | None":
        assert self.grammars is not None
        matcher = self.grammars.matcher(row.grammar)
        row.invalid = matcher.is_error()
        if not row.invalid and matcher.consume_tokens(np.frombuffer(bytes(row.consumed), np.int32).tolist()):
            return matcher
        row.fail(matcher.get_error())
        return None


def _reason(error: str) -> str:
    """Return why an output fails, by the error of its matcher."""
    # The first line is the reason; the library's description of its state follows.
    text = " ".join(error.partition("\n<state>")[0].split())[:_MAX_REASON]
    return f"the output cannot be made to match its grammar: {text or 'the reason is not known'}"


def _first(rows: Sequence[int], drafts: Drafts) -> Iterator[tuple[int, int]]:
    """Yield each of ``rows`` once, behind its first index there: see ``StructuredRows.forbidden``."""
    index = 0
    while index < len(rows):
        yield index, rows[index]
        index += 1 + len(drafts.get(rows[index], ()))


def forbidden_tokens(allowed: npt.NDArray[np.int32], vocab_size: int, upload: Uploads) -> torch.Tensor:
    """Return bool [n, vocab_size] on the device: the tokens whose bits are not set.

    ``allowed`` int32 [n, words]: token t is allowed if bit t % 32 of word t // 32 is set. Only the bits are uploaded.
    """
    packed = np.invert(allowed).view(np.uint8)
    if upload.device.type != "cuda":
        bits = np.unpackbits(packed, axis=1, count=vocab_size, bitorder="little")
        return torch.from_numpy(bits.view(np.bool_))
    on_device = upload(packed)
    shifts = torch.arange(8, dtype=torch.uint8, device=on_device.device)
    return ((on_device[:, :, None] >> shifts) & 1).view(len(packed), -1)[:, :vocab_size].bool()


def load_grammars(config: SizedConfig, vocab_size: int, device: str) -> "tuple[Grammars | None, str]":
    """Return the compiler of grammars for the model's tokenizer; or None, and why there is none.

    ``vocab_size``: the width of the model's logits. ``device``: the type of the device that computes them.
    """
    try:
        from pagewise_executor.structured.grammars import Grammars, NoGrammarsError, load_tokenizer
    except ImportError:
        reason = "llguidance is not installed"
    else:
        path = resolve_model(config.model, config.revision, tokenizer_only=True)
        cores = available_cores() if device == "cuda" else 1
        most = 2 * (config.max_num_seqs + _MORE_GRAMMARS)  # schedulers count on half of them
        try:
            tokenizer = load_tokenizer(path, vocab_size)
            return Grammars(tokenizer, min(_MOST_THREADS, cores), most, min(_MOST_COMPILERS, cores)), ""
        except NoGrammarsError as error:
            reason = str(error)
    log.warning("requests for structured output are refused: %s", reason)
    return None, reason
