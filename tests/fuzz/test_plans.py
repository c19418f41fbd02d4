"""Plans of a hostile scheduler: refused as invalid, or they touch nothing but the rows and blocks there are."""

import contextlib
import importlib
import sys
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagewise_executor.input_batch import InputBatch
from pagewise_executor.model_runner import ModelRunner
from pagewise_executor.plan_checks import InvalidPlanError
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.protocol import DEVICE, HOST, BlockCopies, NewSequence, StepPlan, Welcome, pack_int32s
from pagewise_shared.sampling import SamplingParams, TokenConstraints, token_constraints

from tests import model_builders
from tests.fuzz import messages
from tests.fuzz.effort import examples

ROWS, BLOCKS, HOST_BLOCKS, BLOCK_SIZE, MAX_LEN, VOCAB = 3, 8, 4, 4, 14, model_builders.VOCAB_SIZE
"""The model's length is no multiple of the block size."""


def ints(low: int, high: int) -> st.SearchStrategy[int]:
    """Mostly existing values, sometimes values just outside."""
    there = st.integers(low, high - 1)
    return st.one_of(there, there, there, there, st.sampled_from([low - 1, high]), messages.INTS)


def packed(values: st.SearchStrategy[int], most: int, times: int = 1) -> st.SearchStrategy[bytes]:
    near = values.filter(lambda value: -(2**31) <= value < 2**31)
    return st.one_of(
        st.lists(st.tuples(*[near] * times), max_size=most).map(lambda all_: pack_int32s(chain.from_iterable(all_))),
        messages.BYTES,
    )


ROW = ints(0, ROWS)
SAMPLING = st.one_of(
    st.just(SamplingParams(temperature=0)),
    st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.7]),
        logprobs=st.sampled_from([None, 0, 2, -1]),
        prompt_logprobs=st.sampled_from([None, 1]),
        min_tokens=st.integers(0, 3),
        repetition_penalty=st.sampled_from([1.0, 1.5]),
        stop_token_ids=st.lists(ints(0, VOCAB), max_size=2).map(tuple),
    ),
    messages.of(SamplingParams),
)
CONSTRAINTS = st.one_of(
    st.builds(
        token_constraints,
        st.lists(st.integers(0, VOCAB), min_size=1, max_size=3),
        st.dictionaries(st.integers(-1, VOCAB), st.floats(-100, 100), max_size=2),
        st.lists(st.lists(st.integers(-1, VOCAB), max_size=2), max_size=2),
    ),
    messages.of(TokenConstraints),
)
JOINED = st.builds(
    NewSequence,
    row=ROW,
    tokens=st.one_of(st.integers(4, MAX_LEN + 1).map(lambda n: pack_int32s(range(n))), packed(ints(0, VOCAB), MAX_LEN)),
    num_prompt_tokens=ints(1, 4),
    num_computed_tokens=ints(0, 4),
    blocks=packed(ints(0, BLOCKS), 4),
    sampling=SAMPLING,
    constraints=st.sampled_from([-1, -1, 0, 1, -2]),
)
COMPUTED = st.lists(st.tuples(ROW, ints(0, MAX_LEN)), max_size=1).map(tuple)
TIERS = {DEVICE: BLOCKS, HOST: HOST_BLOCKS}
TIER = ints(DEVICE, HOST + 1)
COPIES = st.one_of(
    st.builds(BlockCopies, st.just(DEVICE), st.just(HOST), packed(ints(0, HOST_BLOCKS), 2, 2)),
    st.builds(BlockCopies, st.just(DEVICE), st.just(DEVICE), packed(ints(0, BLOCKS), 2, 2)),
    st.builds(BlockCopies, st.just(HOST), st.just(DEVICE), packed(ints(0, HOST_BLOCKS), 2, 2)),
    st.builds(BlockCopies, TIER, TIER, packed(ints(0, BLOCKS), 2, 2)),
    messages.of(BlockCopies),
)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "left": st.lists(ROW, max_size=2).map(tuple),
    "copies": st.lists(COPIES, max_size=3).map(tuple),
    "computed": COMPUTED,
    "joined": st.lists(JOINED, max_size=2).map(tuple),
    "constraints": st.lists(CONSTRAINTS, min_size=1, max_size=2).map(tuple),
    "tables": st.lists(st.tuples(ROW, ints(0, 4), ints(0, BLOCKS)), max_size=2)
    .filter(lambda triples: all(-(2**31) <= value < 2**31 for triple in triples for value in triple))
    .map(lambda triples: pack_int32s(chain.from_iterable(triples))),
    "drafts": st.lists(st.tuples(ROW, packed(ints(0, VOCAB), 5)), max_size=2).map(tuple),
    "chunks": st.lists(st.tuples(ROW, ints(1, MAX_LEN + 1)), max_size=2).map(tuple),
}


def join(row: int, size: int, computed: int) -> StepPlan:
    """A scheduler's first plan: a sequence whose tokens are computed in one chunk, or in two."""
    blocks = pack_int32s(range(2 * row, 2 * row + 2))
    new = NewSequence(row, pack_int32s(range(size)), size, 0, blocks, SamplingParams(temperature=0))
    return StepPlan(1, 1, joined=(new,), chunks=((row, min(size, computed)),))


JOIN = st.builds(join, st.integers(0, ROWS - 1), st.integers(1, 8), st.integers(1, 12))
GOOD = st.one_of(JOIN, JOIN, *[st.just(StepPlan(1, 1))] * 3)


@st.composite
def nearly_good(draw: st.DrawFn) -> StepPlan:
    plan = draw(GOOD)
    names = draw(st.lists(st.sampled_from(sorted(FIELDS)), min_size=1, max_size=2, unique=True))
    if "joined" in names and draw(st.booleans()):  # shared constraints come with sequences
        names.append("constraints")
    return msgspec.structs.replace(plan, **{name: draw(FIELDS[name]) for name in names})


STEPS = st.lists(st.one_of(GOOD, GOOD, nearly_good()), min_size=1, max_size=12)


def new_batch() -> InputBatch:
    return InputBatch(
        num_rows=ROWS,
        max_model_len=MAX_LEN,
        block_size=BLOCK_SIZE,
        pool_blocks=BLOCKS,
        tiers={HOST: HOST_BLOCKS},
        vocab_size=VOCAB,
    )


@examples(400)
@given(STEPS)
def test_what_the_input_batch_accepts_stays_inside_the_pool(plans: list[StepPlan]) -> None:
    batch = new_batch()
    for plan in plans:
        try:
            work = batch.apply(plan)
        except InvalidPlanError:
            batch = new_batch()  # a Welcome follows: all rows are emptied
            continue
        rows, positions = batch.flat_batch(work)
        slots = batch.slot_mapping(rows, positions)
        assert not len(slots) or (slots.min() >= 0 and slots.max() < BLOCKS * BLOCK_SIZE)
        assert not len(positions) or positions.max() < MAX_LEN
        drafted = sum(len(draft.tokens) for draft in work.drafts)
        assert len(set(work.sampled_rows)) == len(work.sampled_rows) - drafted <= ROWS
        for job in work.copies:
            assert (job.pairs[:, 1] >= 0).all()
            assert (job.pairs[:, 1] < TIERS[job.target]).all()
            if job.peer is None:
                assert {job.source, job.target} in ({DEVICE}, {DEVICE, HOST})
                assert (job.pairs[:, 0] >= 0).all()
                assert (job.pairs[:, 0] < TIERS[job.source]).all()
            else:
                assert job.target == DEVICE
        assert all(0 <= start < stop <= batch.block_tables.shape[1] for _, start, stop in work.changed_tables)
        for held in batch.sequences.values():
            assert held.tokens.min() >= 0
            assert held.tokens.max() < VOCAB
        batch.advance(work)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    path: Path = tmp_path_factory.mktemp("model")
    config, settings = model_builders.FAMILIES["gpt2"]  # with learned positions: one too far is out of range
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(model_builders.FAMILIES, "gpt2", (config, settings | {"n_positions": MAX_LEN}))
        model_builders.build_model("gpt2", path)
    options = {"block_size": BLOCK_SIZE, "num_blocks": BLOCKS, "max_num_seqs": ROWS, "profile": False}
    runner = ModelRunner(ExecutorConfig(model=str(path), device="cpu", host_memory="18432", **options))
    assert (runner.info.max_model_len, runner.info.vocab_size) == (MAX_LEN, VOCAB)
    assert [(tier.number, tier.num_blocks) for tier in runner.info.tiers] == [(HOST, HOST_BLOCKS)]
    return runner


@examples(80)
@given(STEPS)
def test_a_model_computes_what_is_taken(runner: ModelRunner, plans: list[StepPlan]) -> None:
    runner.reset(Welcome(1, ROWS, 64))
    for plan in plans:
        try:
            result = runner.execute(plan).result()
            assert result.error is None
        except InvalidPlanError:
            runner.reset(Welcome(1, ROWS, 64))


def test_what_is_fuzzed_by_coverage_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    # `make fuzz` needs atheris for it, which is seldom installed: a test that is renamed would be missed late.
    atheris = SimpleNamespace(instrument_imports=lambda include: contextlib.nullcontext())
    monkeypatch.setitem(sys.modules, "atheris", atheris)
    importlib.import_module("tests.fuzz.guided")
