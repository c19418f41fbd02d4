"""Reports: the requests that a query shows, by their ids, with their times and executors."""

import asyncio
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pagewise_scheduler.server.submissions import MAX_CLIENT_ID
from pagewise_shared.protocol import RequestParams, Submit

from tests.scheduler.server.played_gateway import GREEDY, RefusedRequestError, prompts_of
from tests.scheduler.server.stack import Stack, executor, running, until


async def report(stack: Stack, name: str, key: str = "") -> dict[str, Any] | None:
    answer = await stack.gateway.ask("request", name, 100, key)
    return msgspec.json.decode(answer.body) if answer.found else None


async def test_a_key_sees_its_own_requests_and_no_hashes(tmp_path: Path) -> None:
    prompt = list(range(1, 21))
    async with running(tmp_path) as stack, executor(tmp_path, step_seconds=0.02):
        await stack.ready(1)
        requests = [
            await stack.gateway.submit(prompt, max_tokens=100, key=key, request_id=f"id-{key}", client_request_id="job")
            for key in ("a", "b")
        ]
        for request in requests:
            await request.until_tokens(2)
        for ended in (False, True):
            for name in ("id-a", "job"):
                seen = await report(stack, name, "a")
                assert seen is not None
                assert (seen["request_id"], seen["client_request_id"], seen["key"]) == ("id-a", "job", "a")
                assert '"hash"' not in msgspec.json.encode(seen).decode()
            for nobody_s in ("id-b", "nobody", "", "id-a-1"):
                assert await report(stack, nobody_s, "a") is None
            assert await report(stack, "id-a", "c") is None
            whole = await report(stack, "id-a")
            assert whole is not None
            if not ended:
                blocks = whole["sequences"][0]["blocks"]
                assert any(len(block.get("hash", "")) == 64 and block["cached"] for block in blocks)
                mine = await report(stack, "id-a", "a")
                assert mine is not None
                assert [block.get("cached") for block in mine["sequences"][0]["blocks"][:5]] == [True] * 5
            for request in requests:
                await stack.gateway.abort(request)
            await stack.all_free()
        for kind in ("memory", "metrics"):
            assert not (await stack.gateway.ask(kind, key="a")).found
            assert (await stack.gateway.ask(kind)).found


async def test_an_id_of_several_requests_means_the_newest(tmp_path: Path) -> None:
    async with running(tmp_path) as stack, executor(tmp_path, step_seconds=0.005):
        await stack.ready(1)
        for number, tokens in enumerate((120, 4, 60)):
            request = await stack.gateway.submit(
                [number + 1, 2, 3], max_tokens=tokens, key="a", request_id=f"id-{number}", client_request_id="job"
            )
            await request.until_tokens(1)
            for key in ("a", ""):
                seen = await report(stack, "job", key)
                assert seen is not None
                assert seen["request_id"] == f"id-{number}"
            if tokens == 4:
                await request.result()
                seen = await report(stack, "job", "a")
                assert seen is not None
                assert seen["request_id"] == "id-1", "it has ended, and is newer than the one that runs"
        other = await stack.gateway.submit([7, 8], max_tokens=4, key="a", request_id="x", client_request_id="id-0")
        await other.result()
        seen = await report(stack, "id-0", "a")
        assert seen is not None
        assert seen["request_id"] == "id-0", "our own id comes before a client's"


async def test_a_report_tells_times_and_executors(tmp_path: Path) -> None:
    async with running(tmp_path, placement_timeout=20.0) as stack:
        async with executor(tmp_path, "first", step_seconds=0.02):
            await stack.ready(1)
            began = time.monotonic()
            runs = [await stack.gateway.submit([n, 2, 3], max_tokens=200, request_id=f"run-{n}") for n in range(4)]
            for run in runs:
                await run.until_tokens(1)
            waits = await stack.gateway.submit([9, 2, 3], max_tokens=4, request_id="waits")
            await until(lambda: stack.executors[0].scheduler.num_waiting)
            seen, waiting = await report(stack, "run-0"), await report(stack, "waits")
            assert seen is not None
            assert waiting is not None
            assert [one["executor_id"] for one in seen["executors"]] == ["first"]
            assert 0 <= seen["queue_seconds"] < seen["first_token_seconds"] < seen["arrived_seconds_ago"]
            assert seen["arrived_seconds_ago"] <= time.monotonic() - began
            assert (waiting["queue_seconds"], waiting["first_token_seconds"]) == (None, None)
        await stack.ready(0)
        left = await report(stack, "waits")
        assert left is not None
        assert ([one["executor_id"] for one in left["executors"]], left["queue_seconds"]) == (["first"], None)
        unplaced = await stack.gateway.submit([5, 6], max_tokens=4, key="a", client_request_id="new")
        await until(lambda: len(stack.router.unplaced) == 6)
        new = await report(stack, "new", "a")
        assert new is not None
        assert (new["executors"], new["sequences"]) == ([], [])
        assert await report(stack, "new", "b") is None
        async with executor(tmp_path, "second"):
            await unplaced.result()
            await asyncio.gather(*(run.result() for run in (*runs, waits)))
            again = await report(stack, "run-0")
            assert again is not None
            assert [one["executor_id"] for one in again["executors"]] == ["first", "second"]
            assert again["first_token_seconds"] == seen["first_token_seconds"], "it had its first token before it moved"
            assert again["arrived_seconds_ago"] > seen["arrived_seconds_ago"]
            assert seen["ended_seconds_ago"] is None
            lasted = again["arrived_seconds_ago"] - again["ended_seconds_ago"]
            await asyncio.sleep(0.1)
            later = await report(stack, "run-0")
            assert later is not None
            assert later["ended_seconds_ago"] >= again["ended_seconds_ago"] + 0.1
            assert later["arrived_seconds_ago"] - later["ended_seconds_ago"] == pytest.approx(lasted, abs=1e-4)
            assert lasted > again["first_token_seconds"]
            late = await report(stack, "waits")
            assert late is not None
            assert late["first_token_seconds"] >= late["queue_seconds"] > 0


@pytest.mark.parametrize("given", ["nonsense", f"00-{'a' * 32}-{'b' * 16}-01\n", f"00-{'A' * 32}-{'b' * 16}-01"])
async def test_a_traceparent_is_one(tmp_path: Path, given: str) -> None:
    async with running(tmp_path) as stack, executor(tmp_path):
        await stack.ready(1)
        submit = Submit(0, 0, "id", prompts_of([[1, 2]], 4), RequestParams(GREEDY), traceparent=given)
        with pytest.raises(RefusedRequestError, match="traceparent"):
            await (await stack.gateway.submit_as(submit)).result()


@pytest.mark.parametrize("given", ["x" * (MAX_CLIENT_ID + 1), "a\nb"])
async def test_ids_of_clients_are_bounded_and_printable(tmp_path: Path, given: str) -> None:
    async with running(tmp_path) as stack, executor(tmp_path):
        await stack.ready(1)
        submit = Submit(0, 0, "id", prompts_of([[1, 2]], 4), RequestParams(GREEDY, client_request_id=given))
        with pytest.raises(RefusedRequestError, match="client's id"):
            await (await stack.gateway.submit_as(submit)).result()
