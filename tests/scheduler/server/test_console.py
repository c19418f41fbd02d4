"""The scheduler's messages to consoles, and an operator's way to end a request."""

import asyncio
import time
from base64 import b64decode
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagewise_scheduler.server import console as console_module
from pagewise_scheduler.server.console import Console, fair_share
from pagewise_shared.protocol import ConsoleView

from tests.scheduler.server.stack import Stack, executor, gateway, running, until


async def shown(stack: Stack, part: str, **view: Any) -> list[dict[str, Any]]:
    """The frames of a part, made anew."""
    stack.coordinator._console._answers.clear()
    answer = await stack.gateway.ask("console", view=ConsoleView(part, **view))  # type: ignore[arg-type]
    return [msgspec.json.decode(line) for line in answer.body.split(b"\n")] if answer.found else []


async def test_the_fleet_is_told_of(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        (empty,) = await shown(stack, "fleet")
        assert (empty["executors"], empty["model"]) == ([], "m")
        async with executor(tmp_path, "b", step_seconds=0.01), executor(tmp_path, "a", step_seconds=0.01):
            await stack.ready(2)
            (first,) = await shown(stack, "fleet")
            assert all(one["tokens_per_second"] is None for one in [first["scheduler"], *first["executors"]])
            runs = [await stack.gateway.submit([n, 2, 3, 4, 5], max_tokens=200) for n in range(3)]
            for run in runs:
                await run.until_tokens(20)
            await asyncio.sleep(0.3)
            (frame,) = await shown(stack, "fleet")
            assert [one["executor_id"] for one in frame["executors"]] == ["a", "b"]
            assert frame["scheduler"]["requests_running"] == 3
            assert frame["gateways"] == [{"gateway_id": "gateway", "state": "ready", "requests": 3}]
            assert frame["scheduler"]["tokens_per_second"] > 0
            assert frame["scheduler"]["tokens_per_second"] == pytest.approx(
                sum(one["tokens_per_second"] for one in frame["executors"]), abs=1
            )
            for one in frame["executors"]:
                assert one["state"] == "ready"
                assert sum(one["counts"].values()) == one["device"]["num_blocks"] == 64
            for run in runs:
                await stack.gateway.abort(run)
            await stack.all_free()


async def test_requests_that_wait_run_and_have_ended(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        unplaced = await stack.gateway.submit([1, 2, 3], max_tokens=4, request_id="early", key="a")
        await until(lambda: len(stack.router.unplaced))
        (frame,) = await shown(stack, "requests")
        (line,) = frame["waiting"]
        assert (line["request_id"], line["status"], line["key"]) == ("early", "unplaced", "a")
        async with executor(tmp_path, step_seconds=0.01):
            await unplaced.result()
            prefix = list(range(1, 13))
            runs = []
            for number in range(5):
                request_id = f"r{number}"
                run = await stack.gateway.submit([*prefix, 50 + number], max_tokens=150, request_id=request_id)
                if number < 4:
                    await run.until_tokens(1)
                runs.append(run)
            (frame,) = await shown(stack, "requests")
            assert {line["request_id"] for line in frame["running"]} == {"r0", "r1", "r2", "r3"}
            assert [line["request_id"] for line in frame["waiting"]] == ["r4"]
            (ended,) = frame["ended"]
            assert (ended["request_id"], ended["finish_reason"], ended["output_tokens"]) == ("early", "length", 4)
            first = frame["running"][0]
            assert (first["prompt_tokens"], first["shared_blocks"]) == (13, 3), "the three blocks of the prefix"
            assert first["blocks"] * 4 >= first["computed_tokens"] >= 13
            (fleet,) = await shown(stack, "fleet")
            assert fleet["executors"][0]["saved_blocks"] == 3 * 3, "three of four sequences need no blocks for it"
            for run in runs:
                await stack.gateway.abort(run)
            await stack.all_free()


async def test_a_request_that_has_moved_says_from_where(tmp_path: Path) -> None:
    async with running(tmp_path, placement_timeout=20.0) as stack:
        async with executor(tmp_path, "first", step_seconds=0.01):
            await stack.ready(1)
            run = await stack.gateway.submit([1, 2, 3], max_tokens=80, request_id="moves")
            await run.until_tokens(2)
            (frame,) = await shown(stack, "requests")
            assert "moved_from" not in frame["running"][0]
        await stack.ready(0)
        (frame,) = await shown(stack, "requests")
        (line,) = frame["waiting"]
        assert (line["executor_id"], line["moved_from"]) == ("", "first"), "it is on no executor now"
        async with executor(tmp_path, "second", step_seconds=0.01):
            await run.until_tokens(30)
            (frame,) = await shown(stack, "requests")
            (line,) = frame["running"]
            assert (line["executor_id"], line["moved_from"]) == ("second", "first")
            await run.result()
            (frame,) = await shown(stack, "requests")
            (line,) = frame["ended"]
            assert (line["executor_id"], line["moved_from"]) == ("second", "first")
        async with executor(tmp_path, "second"):
            await (await stack.gateway.submit([1, 2, 3], max_tokens=4, request_id="stays")).result()
            (frame,) = await shown(stack, "requests")
            assert "moved_from" not in next(one for one in frame["ended"] if one["request_id"] == "stays")


async def test_gateways_are_ready_silent_left_or_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def states() -> dict[str, tuple[str, int, str]]:
        (frame,) = await shown(stack, "fleet")
        return {one["gateway_id"]: (one["state"], one["requests"], one.get("reason", "")) for one in frame["gateways"]}

    async with running(tmp_path, gateway_timeout=6.0) as stack, executor(tmp_path, step_seconds=0.05):
        await stack.ready(1)
        async with gateway(tmp_path, "leaves") as leaves, gateway(tmp_path, "falls silent") as silent:
            await (await silent.submit([1, 2, 3], max_tokens=200, request_id="ends with it")).until_tokens(1)
            assert await states() == {
                "gateway": ("ready", 0, ""),
                "leaves": ("ready", 0, ""),
                "falls silent": ("ready", 1, ""),
            }
            await leaves.close(goodbye=True)
            await until(lambda: len(stack.gateways) == 2)
            state, _, reason = (await states())["leaves"]
            assert (state, reason.startswith("it left")) == ("left", True)
            await silent.stop_reading()
            async with asyncio.timeout(20):
                while (found := (await states())["falls silent"])[0] == "ready":
                    await asyncio.sleep(0.1)
            assert found == ("silent", 1, "")
            await until(lambda: len(stack.gateways) == 1)
            state, requests, reason = (await states())["falls silent"]
            assert (state, requests) == ("lost", 1)
            assert reason.startswith("no heartbeat for ")
        async with gateway(tmp_path, "leaves"):
            assert (await states())["leaves"] == ("ready", 0, ""), "it has come back"
        await until(lambda: len(stack.gateways) == 1)  # it sent no Goodbye: the scheduler finds its connection broken
        await stack.all_free()
        monkeypatch.setattr(console_module, "_GONE_SECONDS", 0.0)
        assert list(await states()) == ["gateway"]


async def test_each_executor_s_hits_are_told_by_tier(tmp_path: Path) -> None:
    async with running(tmp_path) as stack, executor(tmp_path, "a"):
        await stack.ready(1)
        await shown(stack, "fleet")
        for _ in range(2):
            await (await stack.gateway.submit(list(range(1, 41)), max_tokens=2)).result()
        await until(lambda: stack.executors[0].stats.cached_tokens["device"])
        async with executor(tmp_path, "b"):
            await stack.ready(2)
            (frame,) = await shown(stack, "fleet")
        rates = {one["executor_id"]: one["hit_rate"] for one in frame["executors"]}
        assert 0.4 < rates["a"]["device"] < 0.5, "nearly all of the second prompt"
        assert rates["a"] == frame["scheduler"]["hit_rate"]
        assert set(rates["b"].values()) == {0.0}


async def test_an_operator_ends_a_request_of_any_gateway(tmp_path: Path) -> None:
    async with (
        running(tmp_path, gateways_end_any_request=True) as stack,
        executor(tmp_path, step_seconds=0.01),
        gateway(tmp_path, "other") as other,
    ):
        await stack.ready(1)
        run = await stack.gateway.submit([1, 2, 3], max_tokens=200, n=2, request_id="id", client_request_id="job")
        await run.until_tokens(4)
        assert not await other.end_called("nobody")
        assert not await other.end_called("")
        assert await other.end_called("job")
        tokens = await run.result()
        assert [end.reason for end in run.finished.values()] == ["abort", "abort"]
        assert all(0 < len(one) < 200 for one in tokens)
        await stack.all_free()
        assert not await other.end_called("job")


async def test_a_gateway_alone_ends_its_own_requests_only(tmp_path: Path) -> None:
    """Its key may have been stolen."""
    async with running(tmp_path) as stack, executor(tmp_path, step_seconds=0.01), gateway(tmp_path, "other") as other:
        await stack.ready(1)
        run = await stack.gateway.submit([1, 2, 3], max_tokens=20, request_id="id", client_request_id="job")
        await run.until_tokens(2)
        assert not await other.end_called("id")
        assert not await other.end_called("job")
        assert len((await run.result())[0]) == 20
        run = await stack.gateway.submit([1, 2, 3], max_tokens=200, request_id="id")
        await run.until_tokens(2)
        assert await stack.gateway.end_called("id")
        assert len((await run.result())[0]) < 200


async def test_an_operator_ends_a_request_that_waits(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        run = await stack.gateway.submit([1, 2, 3], max_tokens=20, request_id="id")
        await until(lambda: len(stack.router.unplaced))
        assert await stack.gateway.end_called("id")
        assert await run.result() == [[]]
        assert run.finished[run.stream].reason == "abort"
        assert not len(stack.router.unplaced)


async def test_equal_views_share_an_answer_and_answers_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    make = Console._make

    def counted(console: Console, view: ConsoleView, now: float, known: Any) -> bytes | None:
        made.append(view.part)
        return make(console, view, now, known)

    monkeypatch.setattr(Console, "_make", counted)
    async with running(tmp_path) as stack, gateway(tmp_path, "other") as other:
        for asker in (stack.gateway, other) * 3:
            assert (await asker.ask("console", view=ConsoleView("fleet"))).found
        assert made == ["fleet"]
        await stack.gateway.ask("console", view=ConsoleView("requests"))
        assert made == ["fleet", "requests"]
        for number in range(600):
            await stack.gateway.ask("console", view=ConsoleView("block", f"nobody-{number}"))
        assert len(stack.coordinator._console._answers) <= 256


async def test_a_client_s_key_sees_nothing_of_it(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        assert not (await stack.gateway.ask("console", key="a", view=ConsoleView("fleet"))).found
        assert not (await stack.gateway.ask("console")).found


async def test_maps_and_prefixes_of_all_executors(tmp_path: Path) -> None:
    async with running(tmp_path, console_shows_text=True) as stack:
        assert await shown(stack, "prefixes") == [{"executors": []}]
        async with executor(tmp_path, "a", step_seconds=0.01), executor(tmp_path, "b"):
            await stack.ready(2)
            maps = await shown(stack, "map", cells=8)
            assert [(one["executor_id"], one["blocks_per_cell"]) for one in maps] == [("a", 16), ("b", 16)]
            assert {len(b64decode(one["cells"])) for one in maps} == {8}
            run = await stack.gateway.submit(list(range(1, 14)), max_tokens=100, request_id="r")
            await run.until_tokens(2)
            maps = await shown(stack, "map")
            assert {one["counts"]["in_use"] for one in maps} > {0}
            for one in maps:
                colours = b64decode(one["cells"])[::2]
                names = ["free", "cached", "in_use", "lent", "copying"]
                assert [colours.count(index) for index in range(5)] == [one["counts"][name] for name in names]
                assert len(colours) == one["num_blocks"]
            here = next(one["executor_id"] for one in maps if one["counts"]["in_use"])
            (part,) = await shown(stack, "map", executor_id=here, first=8, count=4, colour="request")
            assert (part["first"], part["count"], len(b64decode(part["cells"]))) == (8, 4, 8)
            (zoomed,) = await shown(stack, "map", executor_id=here, first=60, count=1000)
            assert (zoomed["first"], zoomed["count"]) == (60, 4), "as far as there are blocks"
            (tree,) = await shown(stack, "prefixes", executor_id=here)
            assert tree["executors"][0]["runs"][0]["num_blocks"] >= 3
            assert "token_ids" not in tree["executors"][0]["runs"][0]
            (tree,) = await shown(stack, "prefixes", executor_id=here, tokens=True)
            assert tree["executors"][0]["runs"][0]["token_ids"][:4] == [1, 2, 3, 4]
            block = next(number for number in range(64) if stack.executors[0].scheduler.kv.pool.states[number] == 0)
            (details,) = await shown(stack, "block", executor_id="a", block=block)
            assert details["state"] == "free"
            for nothing in ({"executor_id": "c"}, {"executor_id": "a", "tier": "host"}):
                assert await shown(stack, "map", **nothing) == []
                assert await shown(stack, "block", **nothing) == []
            assert await shown(stack, "block", executor_id="a", block=64) == []
            await stack.gateway.abort(run)
            await stack.all_free()
        await stack.ready(0)


async def test_gateways_get_no_tokens_of_prompts_unless_the_scheduler_allows_it(tmp_path: Path) -> None:
    async with running(tmp_path) as stack, executor(tmp_path, "a"), gateway(tmp_path, "attacker") as attacker:
        await stack.ready(1)
        await (await stack.gateway.submit(list(range(1, 14)), max_tokens=2)).result()
        view = ConsoleView("prefixes", "a", tokens=True)
        tree = msgspec.json.decode((await attacker.ask("console", view=view)).body)
        assert tree["executors"][0]["runs"][0]["num_blocks"] >= 3
        for block in range(64):
            view = ConsoleView("block", "a", block=block, tokens=True)
            assert b"token_ids" not in (await attacker.ask("console", view=view)).body
        assert "token_ids" not in str(tree)


async def test_answers_take_a_bounded_share_of_a_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, list[float]] = {"map": [], "fleet": []}

    def slow(console: Console, view: ConsoleView, now: float, known: object) -> bytes:
        made[view.part].append(now)
        until_ = time.thread_time() + (0.02 if view.part == "map" else 0.0)
        while time.thread_time() < until_:
            pass
        return b"{}"

    monkeypatch.setattr(Console, "_make", slow)
    async with running(tmp_path) as stack:
        until_ = time.monotonic() + 3.0
        while time.monotonic() < until_:
            for part in ("map", "fleet"):
                assert (await stack.gateway.ask("console", view=ConsoleView(part))).found  # type: ignore[arg-type]
            await asyncio.sleep(0.05)
    assert len(made["map"]) <= 2, "20 milliseconds each, and 0.3% of a core for it"
    assert len(made["fleet"]) >= 4, "what is cheap goes on as before"


class Clocked:
    """A console whose answers take ``seconds``, in a time of its own."""

    def __init__(self, stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.seconds = 1000.0, 0.0
        self.made: list[ConsoleView] = []
        self._cpu = 0.0
        self._console = stack.coordinator._console

        def make(console: Console, view: ConsoleView, now: float, known: object) -> bytes:
            self.made.append(view)
            self._cpu += self.seconds
            return b"{}"

        monkeypatch.setattr(Console, "_make", make)
        monkeypatch.setattr(console_module, "clock", lambda: self.now)
        monkeypatch.setattr(console_module, "time", SimpleNamespace(thread_time=lambda: self._cpu))

    def watch(self, view: ConsoleView, seconds: float) -> int:
        """Ask for it twice a second; return how often it was made."""
        before = self.made.count(view)
        for _ in range(int(2 * seconds)):
            self._console.answer(view)
            self.now += 0.5
        return self.made.count(view) - before


async def test_views_that_nobody_asks_for_take_nothing_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path) as stack:
        clocked = Clocked(stack, monkeypatch)
        clocked.seconds = 0.003
        for first in range(20):  # a reader moves over the map
            clocked.watch(ConsoleView("map", "e", first=first), 0.5)
        clocked.watch(ConsoleView("map", "e"), 6.0)
        assert clocked.watch(ConsoleView("map", "e"), 10.0) >= 9, "0.3% of a core are 3 ms a second"


async def test_what_took_long_once_is_made_as_often_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(tmp_path) as stack:
        clocked = Clocked(stack, monkeypatch)
        clocked.seconds = 0.0001
        clocked.watch(ConsoleView("fleet"), 5.0)
        clocked.seconds = 0.05  # a garbage collection
        clocked.watch(ConsoleView("fleet"), 0.5)
        clocked.seconds = 0.0001
        assert clocked.watch(ConsoleView("fleet"), 5.0) == 10
        clocked.seconds = 1.0  # it takes that long, and is shown now and then all the same
        assert clocked.watch(ConsoleView("fleet"), 60.0) in (6, 7)


@pytest.mark.parametrize(
    ("loads", "share"),
    [
        ([], inf),
        ([1.0, 2.0], inf),
        ([1.0, 5.0], 3.0),
        ([5.0, 1.0, 5.0], 1.5),
        ([9.0, 9.0], 2.0),
    ],
)
def test_what_cheap_views_leave_is_shared_by_the_others(loads: list[float], share: float) -> None:
    assert fair_share(loads, 4.0) == share


@given(st.lists(st.floats(0.0, 1.0), max_size=20))
def test_views_together_take_no_more_than_they_may(loads: list[float]) -> None:
    share = fair_share(loads, 0.5)
    assert sum(min(load, share) for load in loads) == pytest.approx(min(0.5, sum(loads)), abs=1e-9)
