"""The processes that compile grammars: a grammar that is too expensive ends one of them, and nothing else."""

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from llguidance import LLMatcher
from pagewise_gateway.structured import grammars as module
from pagewise_gateway.structured.checker import SECONDS, Checker
from pagewise_gateway.structured.grammars import Grammars, json_schema_grammar, regex_grammar
from pagewise_gateway.structured.walk import GrammarError, TooManyGrammarsError

HARD = LLMatcher.grammar_from_json_schema(
    json.dumps({"allOf": [{"type": "string", "pattern": f".*a.{{{number}}}b.*"} for number in range(1, 40)]})
)
"""Grammars that take the library hours and all memory, made without the checks that refuse them before."""
LATE = LLMatcher.grammar_from_lark("start: X\nX: " + " & ".join(f"/.*a.{{{number}}}b.*/" for number in range(1, 40)))
"""The same, but only where an output begins."""
TOO_LONG = f"compiling it takes more than {SECONDS:g} s, the limit for a grammar"


@pytest.fixture
def checker() -> Iterator[Checker]:
    checker = Checker()
    yield checker
    checker.close()


@pytest.fixture
async def grammars() -> AsyncIterator[Grammars]:
    grammars = Grammars()
    yield grammars
    grammars.close()


def test_flaws_are_those_of_the_library(checker: Checker) -> None:
    assert checker.validate(regex_grammar("a+"), 1000) == ""
    assert "look-around" in checker.validate(regex_grammar("(?=a)b"), 1000)
    assert "grammar size" in checker.validate(LLMatcher.grammar_from_lark('start: "a" "b" "c" "d"'), 2)
    assert checker.validate(LLMatcher.grammar_from_lark('start: <[70000]> "a"'), 1000) == ""
    assert checker.validate(LLMatcher.grammar_from_lark('start: <|any|> "a"'), 1000) == ""


@pytest.mark.parametrize("grammar", [HARD, LATE], ids=["compiling", "beginning"])
def test_what_takes_too_long_is_ended(checker: Checker, grammar: str) -> None:
    with pytest.raises(GrammarError) as error:
        checker.validate(grammar, 1000)
    assert str(error.value) == TOO_LONG
    assert checker.validate(regex_grammar("a+"), 1000) == ""


@pytest.mark.parametrize(
    ("number", "reason"),
    [(signal.SIGABRT, "more than 1024 MiB of memory"), (signal.SIGSEGV, "recursion"), (signal.SIGILL, "fails")],
)
def test_a_process_that_ends_while_it_compiles_refuses_the_grammar(
    checker: Checker, number: signal.Signals, reason: str
) -> None:
    before = set(psutil.Process().children())
    assert checker.validate(regex_grammar("a+"), 1000) == ""
    (process,) = set(psutil.Process().children()) - before
    with ThreadPoolExecutor(1) as thread:
        compiling = thread.submit(checker.validate, HARD, 1000)
        spent = process.cpu_times().user
        while process.cpu_times().user == spent and not compiling.done():
            time.sleep(0.01)
        process.send_signal(number)
        with pytest.raises(GrammarError, match=reason):
            compiling.result(60)
    assert checker.validate(regex_grammar("a+"), 1000) == ""


def test_a_process_that_was_killed_refuses_nothing(checker: Checker) -> None:
    before = set(psutil.Process().children())
    assert checker.validate(regex_grammar("a+"), 1000) == ""
    (process,) = set(psutil.Process().children()) - before
    process.kill()
    psutil.wait_procs([process], 10)
    assert checker.validate(regex_grammar("a+"), 1000) == ""


async def test_an_expensive_grammar_delays_no_other_key(grammars: Grammars) -> None:
    async def attack(number: int) -> str:
        with pytest.raises(GrammarError) as error:
            await grammars.checked(lambda _: HARD + " " * number, "attacker")
        return str(error.value)

    await grammars.checked(lambda _: regex_grammar("a"), "other")  # a process has been started
    attacks = asyncio.gather(*map(attack, range(4)))
    waited = []
    while not attacks.done():
        began = time.perf_counter()
        text = f"b{len(waited)}"
        assert await grammars.checked(lambda _, text=text: regex_grammar(text), "other")  # type: ignore[misc]
        waited.append(time.perf_counter() - began)
        await asyncio.sleep(0.02)
    assert set(await attacks) == {TOO_LONG}
    assert len(waited) > 4
    assert sorted(waited)[len(waited) // 2] < SECONDS / 2


async def test_a_grammar_that_was_refused_is_not_compiled_again(grammars: Grammars) -> None:
    began = 0.0
    for _ in range(2):
        began = time.perf_counter()
        with pytest.raises(GrammarError, match="compiling it takes more"):
            await grammars.checked(lambda _: HARD, "key")
    assert time.perf_counter() - began < SECONDS / 2


async def test_so_many_grammars_of_a_key_wait(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING_GRAMMARS", 2)
    asked = [asyncio.ensure_future(grammars.checked(lambda _: HARD, "key")) for _ in range(4)]
    results = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(result) for result in results] == [GrammarError] * 3 + [TooManyGrammarsError]
    assert await grammars.checked(lambda _: json_schema_grammar({"type": "null"}), "key")


async def test_a_client_that_leaves_gives_its_turn_back(grammars: Grammars) -> None:
    asked = [asyncio.ensure_future(grammars.checked(lambda _: HARD, "key")) for _ in range(3)]
    await asyncio.sleep(0.05)
    for one in asked:
        one.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    async with asyncio.timeout(30):
        assert await grammars.checked(lambda _: regex_grammar("a"), "key")
