"""The actor that holds a process, with real processes and without Ray: its reports, and failures that it survives."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from pagewise import process
from pagewise.cluster import process_actor
from pagewise.cluster.plan import ProcessPlan, make_plan
from pagewise.cluster.process_actor import Description, ProcessActor, read_description
from pagewise.cluster.reconcile import Kind
from pagewise_shared.config import ExecutorConfig, SchedulerConfig, UpConfig

WAITING = "print('listening tcp://a tcp://b', flush=True)\ntime.sleep(600)\n"
Write = Callable[[str], None]


class Here(ProcessActor):
    """On this machine instead of a node of Ray's."""

    @staticmethod
    def _place() -> tuple[str, str]:
        return "127.0.0.1", "this machine"


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(process, "_PAUSES", (0.05,))
    monkeypatch.setattr(process_actor, "_HOPELESS_SECONDS", 0.05)
    return tmp_path


@pytest.fixture
def write_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes the code that runs in place of the scheduler."""
    package = tmp_path / "code" / "pagewise_scheduler"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    return lambda code: Path(package / "main.py").write_text(f"import os, sys, time\n{code}") and None


def plan_of(kind: Kind, keys: dict[str, bytes] | None = None, **options: Any) -> ProcessPlan:
    return make_plan(UpConfig(**options), gpus=False, keys=keys).processes[kind]


@asynccontextmanager
async def started(name: str, plan: ProcessPlan, scheduler: str = "") -> AsyncIterator[ProcessActor]:
    actor = Here(name, plan)
    if scheduler:
        await actor.point(scheduler)
    await actor.start()
    try:
        yield actor
    finally:
        await actor.stop(False)


async def said_by(actor: ProcessActor, condition: Callable[[Description], Any]) -> Description:
    async with asyncio.timeout(60):
        while not condition(said := read_description(await actor.describe())):
            await asyncio.sleep(0.02)
    return said


def is_ready(said: Description) -> bool:
    return said.state == "ready"


def folder_of(said: Description) -> Path:
    """The folder of a process that an actor has started."""
    assert said.pid is not None
    command = Path(f"/proc/{said.pid}/cmdline").read_text().split("\0")
    return Path(next(word for word in command if word.startswith("--keys=")).removeprefix("--keys=")).parent


async def test_an_executor_is_ready_when_it_has_joined_whatever_it_logs(temporary: Path) -> None:
    plan = make_plan(
        UpConfig(
            scheduler=SchedulerConfig(log_level="error"),
            executor=ExecutorConfig(log_level="error", simulate=True, profile=False),
        ),
        gpus=False,
        keys=None,
    )
    async with started("scheduler-0", plan.processes["scheduler"]) as scheduler:
        _, for_executors = (await said_by(scheduler, is_ready)).listening
        async with started("executor-0", plan.processes["executor"], for_executors) as executor:
            await said_by(executor, is_ready)
            assert await executor.lines(0) == (0, [])
    assert not os.listdir(temporary), "folders with keys go with their actors"


async def test_a_process_that_dies_again_and_again_is_a_problem_until_it_is_ready(
    write_service: Write, temporary: Path
) -> None:
    write_service(
        f"if os.path.exists('{temporary}/words'): print('the device is broken', file=sys.stderr)\n"
        f"if not os.path.exists('{temporary}/go'): os.abort()\n{WAITING}"
    )
    async with started("scheduler-0", plan_of("scheduler")) as actor:
        said = await said_by(actor, lambda said: said.problem)
        assert said.restarts == 3
        assert said.problem.startswith("it has ended 3 times before it was ready, now with exit code -6")
        assert said.problem.endswith("its last line: it has logged nothing")
        (temporary / "words").touch()
        await said_by(actor, lambda said: said.problem.endswith("its last line: the device is broken"))
        (temporary / "go").touch()
        assert (await said_by(actor, is_ready)).problem == ""


async def test_one_that_was_ready_may_die_without_being_a_problem(write_service: Write) -> None:
    write_service(WAITING)
    async with started("scheduler-0", plan_of("scheduler")) as actor:
        for restarts in range(4):
            said = await said_by(actor, lambda said, restarts=restarts: is_ready(said) and said.restarts == restarts)
            assert said.problem == ""
            assert said.pid is not None
            os.kill(said.pid, signal.SIGKILL)


async def test_a_folder_that_a_cleaner_has_removed_is_made_again(write_service: Write) -> None:
    write_service(WAITING)
    async with started("scheduler-0", plan_of("scheduler")) as actor:
        before = await said_by(actor, is_ready)
        folder = folder_of(before)
        shutil.rmtree(folder)
        assert before.pid is not None
        os.kill(before.pid, signal.SIGKILL)
        after = await said_by(actor, lambda said: is_ready(said) and said.pid not in (None, before.pid))
        assert folder_of(after) == folder
        assert list(folder.glob("keys/*/*.key_secret"))
        await actor.point("tcp://elsewhere:1")
        shutil.rmtree(folder)
        await actor.point("tcp://elsewhere:2")
        assert (folder / "scheduler").read_text() == "tcp://elsewhere:2"


async def test_without_a_folder_of_its_own_it_tells_why_nothing_starts(write_service: Write, temporary: Path) -> None:
    write_service(WAITING)
    async with started("scheduler-0", plan_of("scheduler")) as actor:
        said = await said_by(actor, is_ready)
        folder = folder_of(said)
        shutil.rmtree(folder)
        folder.symlink_to(temporary)
        await actor.point("tcp://elsewhere:1")
        assert "the scheduler's address cannot be written" in read_description(await actor.describe()).problem
        assert said.pid is not None
        os.kill(said.pid, signal.SIGKILL)
        await said_by(actor, lambda said: "another user's file is in its place" in said.problem)
        folder.unlink()
        await actor.point("tcp://elsewhere:1")
        assert (await said_by(actor, is_ready)).problem == ""


def test_an_actor_ends_with_what_holds_its_process(temporary: Path) -> None:
    """Ray informs the controller, which starts another one."""
    code = """
import asyncio
from pagewise.cluster.plan import make_plan
from pagewise.cluster.process_actor import ProcessActor
from pagewise_shared.config import UpConfig

class Here(ProcessActor):
    _place = staticmethod(lambda: ("127.0.0.1", "this machine"))

async def take_places():
    raise RuntimeError("a rank of the group is lost")

async def main():
    actor = Here("executor-0", make_plan(UpConfig(), gpus=True, keys=None).processes["executor"])
    actor._ranks.take_places = take_places
    await actor.start()
    await actor.point("tcp://127.0.0.1:1")
    await asyncio.sleep(600)

asyncio.run(main())
"""
    environment = os.environ | {"TMPDIR": str(temporary)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert (done.returncode, "a rank of the group is lost" in done.stderr) == (1, True), done.stderr


def test_what_another_version_says_is_read_as_far_as_it_can_be() -> None:
    assert read_description({}).digest == "", "every field has a default"
    assert read_description({"digest": "d", "state": "ready", "of": "a later version"}).digest == "d"
    said = read_description({"digest": "d", "state": "something new"})
    assert (said.digest, said.state) == ("", "ready"), "it serves with options of before, and is replaced in turn"


async def test_the_next_plan_can_ask_a_process_for_its_keys_and_model() -> None:
    plan = make_plan(UpConfig(executor=ExecutorConfig(model="/models/a")), gpus=False, keys=None)
    kept = [await Here(f"{kind}-0", process).kept() for kind, process in plan.processes.items()]
    assert {path: key for one in kept for path, key in one["keys"].items()} == plan.keys
    assert [one["served"] and one["served"]["model"] for one in kept] == [None, None, "/models/a"]
