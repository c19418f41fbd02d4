"""A runner that invents tokens: no torch, no model, the same protocol. For tests, benchmarks and demonstrations."""

import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import compress, repeat
from math import log

from pagewise_shared.config import ExecutorConfig
from pagewise_shared.config.adapter_options import adapter_capacity
from pagewise_shared.protocol import (
    HOST,
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    AdapterLoaded,
    CompileGrammar,
    DropStored,
    GrammarCompiled,
    Hello,
    Inventory,
    LayerGroup,
    LoadAdapter,
    PromptLogprobs,
    StepPlan,
    StepResult,
    StoredDropped,
    TierInfo,
    TokenLogprobs,
    Welcome,
    pack_float32s,
    pack_int32s,
)

from pagewise_executor.device_defaults import with_step_limits
from pagewise_executor.grouped_batch import batch_for
from pagewise_executor.runner import BesideSteps, Counted, FinishedStep, Report
from pagewise_executor.step_work import StepWork, accept, kept_tokens

_DEFAULT_BLOCKS = 4096
_MAX_MODEL_LEN = 8192
_VOCAB_SIZE = 4096


class SimulatedRunner:
    """Its tokens are a hash of prompt and position, so a sequence that moves or is recomputed continues alike.

    ``step_seconds`` and ``token_seconds``: the time of a step, and of each of its tokens. ``tiers``: the number of
    blocks of each tier below the device, by the tier's number; None: the tiers of the options. ``groups``: of layers,
    if there are several; then the option for the number of blocks gives the number of pages.
    """

    def __init__(
        self,
        config: ExecutorConfig,
        step_seconds: float = 0.0,
        token_seconds: float = 0.0,
        tiers: Mapping[int, int] | None = None,
        groups: tuple[LayerGroup, ...] = (),
    ) -> None:
        if tiers is None:
            tiers = {HOST: _DEFAULT_BLOCKS} if config.host_memory else {}
        sized, num_blocks = with_step_limits(config, None), config.num_blocks or _DEFAULT_BLOCKS
        asked = num_blocks * config.block_size if config.max_model_len == "auto" else config.max_model_len
        self.info = Hello(
            PROTOCOL_MAJOR,
            PROTOCOL_MINOR,
            executor_id="",
            model_fingerprint="simulated",
            vocab_size=_VOCAB_SIZE,
            max_model_len=min(asked or _MAX_MODEL_LEN, _MAX_MODEL_LEN),
            max_num_seqs=sized.max_num_seqs,
            max_num_batched_tokens=sized.max_num_batched_tokens,
            block_size=config.block_size,
            num_blocks=num_blocks // groups[0].pages_per_block if groups else num_blocks,
            bytes_per_block=0,
            device="simulated",
            dtype="none",
            tiers=tuple(TierInfo(number, tiers[number]) for number in sorted(tiers)),
            no_grammars="tokens are invented, not sampled",
            adapters=adapter_capacity(config),
            groups=groups,
            num_pages=num_blocks if groups else 0,
        )
        self._slots: dict[int, bytes] = {}
        self._report: Report = lambda message: None
        self._step_seconds, self._token_seconds = step_seconds, token_seconds
        self._hashes: dict[int, int] = {}
        self.counted = Counted()

    def report_to(self, report: Report) -> None:
        """Call ``report`` with the outcomes of copies, which are complete at once, and of handled messages."""
        self._report = report

    def handle(self, message: BesideSteps) -> None:
        """Keep the adapter of a slot, on which the tokens of its rows depend, and confirm it. Confirm grammars, which
        invented tokens do not follow. There are no blocks to look up, nor copies to cancel."""
        if isinstance(message, LoadAdapter):
            self._slots[message.slot] = message.adapter.content
            self._report(AdapterLoaded(message.epoch, message.number))
        elif isinstance(message, DropStored):
            self._report(StoredDropped(message.epoch, message.number))
        elif isinstance(message, CompileGrammar):
            self._report(GrammarCompiled(message.epoch, message.number))

    def inventory(self) -> None:
        """Return None: it holds no blocks."""

    def agree(self, inventory: Inventory | None) -> None:
        """Do nothing: it holds no blocks."""

    def close(self) -> None:
        """Do nothing: it holds no resources."""

    def reset(self, welcome: Welcome) -> None:
        """Empty the input batch."""
        tiers = {tier.number: tier.num_blocks for tier in self.info.tiers}
        self._batch = batch_for(self.info, tiers, num_rows=welcome.max_num_seqs)
        self._hashes.clear()

    def execute(self, plan: StepPlan) -> FinishedStep:
        """Invent the step's tokens.

        Raises:
            InvalidPlanError: the plan contradicts the runner's state.
        """
        began = time.perf_counter()
        batch = self._batch
        work = batch.apply(plan)
        for job in work.copies:
            if job.source != job.target:
                self._report(job.confirmed(0.0))
        for row in work.joined:
            self._hashes[row] = self._prompt_hash(row)
        prompt_logprobs = tuple(self._prompt_logprobs(work))
        rows = work.sampled_rows
        tokens = [self._token(*drawn) for drawn in zip(rows, batch.sampled_positions(work).tolist(), strict=True)]
        kept: Iterable[bool] = repeat(True)
        if work.drafts:
            accept(work.drafts, tokens, len(work.decoding))
            kept = kept_tokens(work.drafts, len(work.decoding), len(tokens))
        for row, token in compress(zip(rows, tokens, strict=True), kept):
            batch.sequences[row].sampled.append(token)
        batch.advance(work)
        logprobs = tuple(
            _logprobs(index, tokens[index], count)
            for index, row in enumerate(rows)
            if (count := batch.sequences[row].sampling.logprobs) is not None
        )
        wanted = self._step_seconds + self._token_seconds * work.num_tokens
        if wanted:
            time.sleep(wanted)
        elapsed = int((time.perf_counter() - began) * 1e6)
        result = StepResult(
            plan.epoch, plan.step, pack_int32s(tokens), logprobs, prompt_logprobs=prompt_logprobs, elapsed_us=elapsed
        )
        return FinishedStep(result)

    def _prompt_hash(self, row: int) -> int:
        held = self._batch.sequences[row]
        seed = held.sampling.seed if held.sampling.temperature > 0 else 0
        if (slot := int(self._batch.adapters[row])) >= 0:
            seed ^= zlib.crc32(self._slots[slot])
        return zlib.crc32(held.tokens[: held.num_prompt_tokens].tobytes(), seed % 2**32)

    def _token(self, row: int, position: int) -> int:
        mixed = (self._hashes[row] * 0x9E3779B1 + position * 0x85EBCA77) & 0xFFFFFFFF
        return (mixed ^ (mixed >> 15)) % _VOCAB_SIZE

    def _prompt_logprobs(self, work: StepWork) -> Iterator[PromptLogprobs]:
        for chunk in work.chunks:
            held = self._batch.sequences[chunk.row]
            wanted, last = held.sampling.prompt_logprobs, min(chunk.start + chunk.size, held.num_prompt_tokens - 1)
            if wanted is not None and last > chunk.start:
                positions = range(chunk.start + 1, last + 1)
                entries = tuple(_logprobs(position, int(held.tokens[position]), wanted) for position in positions)
                yield PromptLogprobs(chunk.row, entries)


def _logprobs(index: int, token: int, count: int) -> TokenLogprobs:
    """Invent log-probabilities: the sampled token is the likeliest, and each later id half as likely."""
    values = [-log(2.0) * (rank + 1) for rank in range(max(1, count))]
    ids = [(token + rank) % _VOCAB_SIZE for rank in range(count)]
    return TokenLogprobs(index, token, values[0], 1, pack_int32s(ids), pack_float32s(values[:count]))
