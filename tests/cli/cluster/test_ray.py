"""A deployment on Ray clusters of several nodes on this machine: real nodes, real processes, real streams."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from pagewise.cluster.plan import make_plan
from pagewise.cluster.process_actor import ProcessActor
from pagewise_shared.config import UpConfig, parse_config

from benchmarks.chaos.workload import client_of
from benchmarks.processes import spawn
from tests.executor.ranks.one_rank import texts_of_one_rank

ray = pytest.importorskip("ray", reason="Ray is not installed: make test-ray")

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(400), pytest.mark.filterwarnings("ignore")]

SIMULATED = ("--simulate", "--simulate-step=0.05", "--no-profile", "--port=0", "--executor-timeout=5")
SERVICES = tuple(f"pagewise_{kind}.main" for kind in ("scheduler", "gateway", "executor"))


class Deployment:
    """A Ray cluster whose head runs nothing of ours, and the processes that ``pagewise up`` starts there."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(initialize_head=True, head_node_args=self._node(0) | {"include_dashboard": False})
        self._count = 0
        self._ups: list[subprocess.Popen[str]] = []
        ray.init(address=self.address, namespace="pagewise.pagewise", log_to_driver=False, logging_level="error")

    def _node(self, cpus: int, number: int = 1) -> dict[str, Any]:
        # An address of its own, but not 127.0.0.1, which Ray replaces.
        return {"num_cpus": cpus, "object_store_memory": 80_000_000, "node_ip_address": f"127.0.1.{number}"}

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add_node(self, cpus: int, **more: Any) -> Any:
        self._count += 1
        return self._cluster.add_node(**self._node(cpus, 1 + self._count), **more)

    def remove_node(self, node: Any) -> None:
        """All of a node's processes die at once."""
        self._cluster.remove_node(node, allow_graceful=False)

    def run(self, command: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
        whole = [sys.executable, "-m", "pagewise.main", command, f"--ray={self.address}", *arguments]
        return subprocess.run(whole, capture_output=True, text=True, timeout=180, check=False)

    def start_up(self, *arguments: str, common: tuple[str, ...] = SIMULATED) -> "subprocess.Popen[str]":
        whole = [sys.executable, "-m", "pagewise.main", "up", f"--ray={self.address}", *common, *arguments]
        self._ups.append(spawn(whole, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        return self._ups[-1]

    def up(self, *arguments: str, common: tuple[str, ...] = SIMULATED) -> None:
        process = self.start_up(*arguments, common=common)
        said, _ = process.communicate(timeout=120)
        assert process.returncode == 0, said

    def processes(self) -> dict[str, Any]:
        """Descriptions of the placed processes, by name; none while there is no controller."""
        try:
            report = ray.get(ray.get_actor("controller").report.remote(), timeout=10)
        except (ValueError, ray.exceptions.RayError):
            return {}
        return {name: said for name, (said, stopping) in report["processes"].items() if said and not stopping}

    def ready(self, kind: str) -> list[str]:
        return [name for name, said in self.processes().items() if name.startswith(kind) and said.state == "ready"]

    def url(self) -> str:
        return str(self.processes()[self.ready("gateway")[0]].listening[0])

    def kept(self) -> dict[str, Any]:
        """The plan that the controller keeps for ``pagewise up``."""
        return dict(ray.get(ray.get_actor("controller").kept.remote()))

    def decisions(self) -> str:
        """The log of the controller; empty while there is none."""
        try:
            return "\n".join(ray.get(ray.get_actor("controller").lines.remote(0), timeout=10)[1])
        except (ValueError, ray.exceptions.RayError):
            return ""

    def close(self) -> None:
        for process in self._ups:
            process.kill()
            process.communicate()
        if ray.util.list_named_actors():
            self.run("down")
        ray.shutdown()
        self._cluster.shutdown()


@pytest.fixture
def deployment() -> Iterator[Deployment]:
    made = Deployment()
    try:
        yield made
    finally:
        made.close()


def until(condition: Callable[[], Any], what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.1)


async def ask(client: openai.AsyncOpenAI, number: int, max_tokens: int) -> str:
    text = ""
    async for part in await client.completions.create(
        model="pagewise-demo",
        prompt=f"def method_{number}(self):",
        max_tokens=max_tokens,
        temperature=0.9,
        seed=number,
        stream=True,
        extra_body={"ignore_eos": True},
    ):
        text += part.choices[0].text
    return text


async def ask_all(url: str, count: int, max_tokens: int) -> list[str]:
    async with client_of(url) as client:
        return await asyncio.gather(*(ask(client, number, max_tokens) for number in range(count)))


def folders() -> set[Path]:
    """Folders of keys on this machine."""
    return set(Path("/tmp").glob("pagewise-process-*"))


def secrets_of(pid: int) -> list[Path]:
    """The files of secret keys that a process has been given."""
    command = psutil.Process(pid).cmdline()
    (folder,) = {word.removeprefix("--keys=") for word in command if word.startswith("--keys=")}
    return list(Path(folder).rglob("*.key_secret"))


def ours() -> set[int]:
    """Process ids of all services on this machine that Ray's processes have started, by their folders."""
    found = set()
    for process in psutil.process_iter(["pid", "cmdline"]):
        words = process.info["cmdline"] or []
        if any(service in words for service in SERVICES) and any("/pagewise-process-" in word for word in words):
            found.add(process.info["pid"])
    return found


async def test_up_serves_and_down_leaves_nothing(deployment: Deployment) -> None:
    deployment.add_node(4)
    deployment.add_node(4)
    before = ours()
    folders_before = folders()
    deployment.up("--executors=2", "--gateways=2")
    running = deployment.processes()
    assert sorted(running) == ["executor-0", "executor-1", "gateway-0", "gateway-1", "scheduler-0"]
    assert len({running[name].node for name in ("gateway-0", "gateway-1")}) == 2, "gateways are spread"
    for name in ("gateway-0", "gateway-1"):
        assert len(await ask_all(running[name].listening[0], 3, 5)) == 3
    said = deployment.run("status")
    assert said.returncode == 0
    assert said.stdout.count(" ready ") == 5
    lines = deployment.run("logs", "executor-0").stdout
    assert "executor-0   | " in lines
    assert "joined the scheduler" in lines
    assert deployment.run("logs", "-n", "0").stdout == ""
    assert deployment.run("logs", "-n", "2", "executor-0").stdout.splitlines() == lines.splitlines()[-2:]
    for pid in ours() - before:
        (secret,) = secrets_of(pid)
        assert secret.stat().st_mode & 0o077 == 0
    assert deployment.run("down").returncode == 0
    assert ours() == before
    assert not ray.util.list_named_actors()
    assert {group["state"] for group in ray.util.placement_group_table().values()} <= {"REMOVED"}
    assert folders() <= folders_before
    assert deployment.run("status").returncode == 1
    assert deployment.run("down").returncode == 0, "there is nothing to do"


async def test_nodes_are_removed_under_load_and_no_stream_fails(deployment: Deployment) -> None:
    first = deployment.add_node(1)
    up = deployment.start_up("--executors=3", "--gateways=1")
    until(lambda: deployment.ready("scheduler"), "the scheduler is on the first node")
    nodes = {f"127.0.1.{number}": deployment.add_node(2) for number in (3, 4)}
    said, _ = up.communicate(timeout=120)
    assert up.returncode == 0, said
    deployment.add_node(4)
    url = deployment.url()
    expected = await ask_all(url, 12, 200)

    asking = asyncio.create_task(ask_all(url, 12, 200))
    await asyncio.sleep(2.0)
    before = deployment.processes()["scheduler-0"].address
    await asyncio.to_thread(deployment.remove_node, first)
    assert await asking == expected
    await asyncio.to_thread(until, lambda: deployment.ready("scheduler"), "a scheduler")
    assert deployment.processes()["scheduler-0"].address != before

    running = deployment.processes()
    (other,) = nodes.keys() - {running["gateway-0"].address}
    lost = [name for name, one in running.items() if one.address == other]
    assert any(name.startswith("executor") for name in lost)
    asking = asyncio.create_task(ask_all(url, 12, 200))
    await asyncio.sleep(2.0)
    await asyncio.to_thread(deployment.remove_node, nodes[other])
    assert await asking == expected

    def settled() -> bool:
        """Ray takes some seconds to find out that a node is gone."""
        now = deployment.processes().values()
        return len(deployment.ready("executor")) == 3 and all(one.address != other for one in now)

    await asyncio.to_thread(until, settled, "three executors on nodes that are there")


async def test_processes_their_actors_and_the_controller_come_back(deployment: Deployment) -> None:
    deployment.add_node(4)
    deployment.up("--executors=1")

    def comes_back(name: str, kill: Callable[[], None]) -> None:
        pid = deployment.processes()[name].pid
        kill()

        def back() -> bool:
            now = deployment.processes().get(name)
            return now is not None and now.state == "ready" and now.pid not in (None, pid)

        until(back, f"{name} is back")

    url = deployment.url()
    expected = await ask_all(url, 4, 100)
    asking = asyncio.create_task(ask_all(url, 4, 100))
    await asyncio.sleep(1.0)
    for name in ("scheduler-0", "executor-0"):
        pid = deployment.processes()[name].pid
        await asyncio.to_thread(comes_back, name, lambda pid=pid: os.kill(pid, signal.SIGKILL))
    assert await asking == expected
    pids = {name: one.pid for name, one in deployment.processes().items()}
    ray.kill(ray.get_actor("controller"), no_restart=False)
    # Not the one that is being killed, which may still answer.
    await asyncio.to_thread(until, lambda: "starts, 3 processes are there" in deployment.decisions(), "the next one")
    await asyncio.to_thread(until, lambda: len(deployment.processes()) == 3, "the controller finds what runs")
    assert {name: one.pid for name, one in deployment.processes().items()} == pids, "it has started nothing again"
    await asyncio.to_thread(comes_back, "gateway-0", lambda: os.kill(pids["gateway-0"], signal.SIGKILL))
    await asyncio.to_thread(comes_back, "executor-0", lambda: ray.kill(ray.get_actor("executor-0")))
    await asyncio.to_thread(comes_back, "scheduler-0", lambda: ray.kill(ray.get_actor("scheduler-0")))
    assert await ask_all(deployment.url(), 4, 100) == expected


async def test_executors_come_with_a_queue_and_go_without_one(deployment: Deployment) -> None:
    deployment.add_node(5)
    scaling = ("--scale-queue=2", "--scale-up-after=1", "--scale-down-after=3", "--max-num-seqs=2")
    deployment.up("--executors=1", "--max-executors=2", *scaling)
    url = deployment.url()
    expected = await ask_all(url, 2, 40)
    asking = asyncio.create_task(ask_all(url, 16, 40))
    await asyncio.to_thread(until, lambda: len(deployment.ready("executor")) == 2, "a second executor")
    # Requests on the executor that leaves move, and continue with the same tokens.
    assert (await asking)[:2] == expected
    await asyncio.to_thread(until, lambda: len(deployment.processes()) == 3, "one executor is drained")
    said = deployment.decisions()
    assert "executors: 1 -> 2, because" in said
    assert "executors: 2 -> 1, because nothing has waited" in said
    assert said.count("executors: ") == 2, "nothing flaps"


async def test_other_options_are_taken_on_one_process_after_the_other(deployment: Deployment) -> None:
    deployment.add_node(5)
    deployment.up("--executors=2")
    url = deployment.url()
    expected = await ask_all(url, 6, 150)
    before = deployment.processes()
    asking = asyncio.create_task(ask_all(url, 6, 150))
    await asyncio.sleep(1.0)
    await asyncio.to_thread(deployment.up, "--executors=2", "--drain-timeout=20")
    assert await asking == expected
    after = deployment.processes()
    kept = {name for name in after if name in before and before[name].pid == after[name].pid}
    assert kept == {"scheduler-0", "gateway-0"}, "neither their options nor their keys have changed"
    assert len(deployment.ready("executor")) == 2


def test_all_are_replaced_and_another_model_is_refused(deployment: Deployment) -> None:
    deployment.add_node(6)
    deployment.up("--executors=2")
    before = {one.pid for one in deployment.processes().values()}
    # Readiness does not depend on the log.
    deployment.up("--executors=2", "--log-level=error")
    after = deployment.processes()
    assert len(after) == 4
    assert not before & {one.pid for one in after.values()}
    said = deployment.run("up", *SIMULATED, "--executors=2", "--log-level=error", "another-model")
    assert said.returncode == 1
    assert "the deployment serves MODEL pagewise-demo, and not another-model" in said.stderr
    assert "pagewise down --name pagewise" in said.stderr
    assert {name: one.pid for name, one in deployment.processes().items()} == {
        name: one.pid for name, one in after.items()
    }, "nothing was changed"


def test_an_executor_of_two_ranks_serves_what_one_rank_does(deployment: Deployment) -> None:
    deployment.add_node(4)
    deployment.up("--tensor-parallel=2", "--device=cpu", "--num-blocks=200", common=("--no-profile", "--port=0"))
    assert sorted(deployment.processes()) == ["executor-0", "gateway-0", "scheduler-0"], "its ranks are one executor"
    prompts = [[11 + number, *range(40, 70 + 9 * number)] for number in range(2)]
    with openai.OpenAI(base_url=f"{deployment.url()}/v1", api_key="none") as client:
        answers = [
            client.completions.create(
                model="pagewise-demo", prompt=ids, max_tokens=12, temperature=0, extra_body={"ignore_eos": True}
            )
            for ids in prompts
        ]
    assert [answer.choices[0].text for answer in answers] == texts_of_one_rank(prompts, 12)
    commands = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    assert sum("-m pagewise_executor.follower" in command for command in commands) == 1


RANKS = ("--tensor-parallel=2", "--device=cpu", "--num-blocks=600")


async def test_ranks_on_two_nodes_lose_either_node_under_load_and_no_stream_fails(deployment: Deployment) -> None:
    others = ours()
    deployment.add_node(2)
    waits = ("--executor-timeout=5", "--placement-timeout=300")
    up = deployment.start_up(*RANKS, common=("--no-profile", "--port=0", *waits))
    # These two take the first node, so that the ranks have to be apart.
    until(lambda: {"scheduler-0", "gateway-0"} <= deployment.processes().keys(), "the others are on the first node")
    nodes = {f"127.0.1.{number}": deployment.add_node(1) for number in (3, 4)}
    said, _ = up.communicate(timeout=180)
    assert up.returncode == 0, said
    url = deployment.url()
    expected = await ask_all(url, 8, 60)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        prompt = [11, *range(40, 70)]
        answer = client.completions.create(
            model="pagewise-demo", prompt=prompt, max_tokens=12, temperature=0, extra_body={"ignore_eos": True}
        )
    assert answer.choices[0].text == texts_of_one_rank([prompt], 12)[0]
    lines = deployment.run("logs", "-n", "1000", "executor-0").stdout
    assert "executor-0   | rank 1 | " in lines
    assert len(followers()) == 1

    for of_rank_0 in (False, True):
        one = deployment.processes()["executor-0"]
        before = one.pid
        places = places_of("executor-0")
        assert len(set(places)) == 2
        lost = next(node for node in nodes if (node == one.address) == of_rank_0 and node in places)
        spare = f"127.0.1.{3 + len(nodes)}" if not of_rank_0 else f"127.0.1.{4 + len(nodes)}"
        nodes[spare] = deployment.add_node(1)
        asking = asyncio.create_task(ask_all(url, 8, 60))
        await asyncio.sleep(0.5)
        await asyncio.to_thread(deployment.remove_node, nodes.pop(lost))
        assert await asking == expected

        def again(before: int = before, lost: str = lost) -> bool:
            now = deployment.processes().get("executor-0")
            return bool(now and now.state == "ready" and now.pid != before and lost not in places_of("executor-0"))

        await asyncio.to_thread(until, again, "the executor is ready with the nodes that are left", 120.0)
    (rank,) = followers()
    os.kill(rank, signal.SIGKILL)
    await asyncio.to_thread(until, lambda: followers() not in ([], [rank]), "the group has started again")
    assert await ask_all(url, 8, 60) == expected
    assert deployment.run("down").returncode == 0
    assert not followers()
    assert ours() == others


def places_of(executor: str) -> list[str]:
    """The addresses of the nodes that have the ranks of an executor."""
    nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    return [
        nodes[node]
        for group in ray.util.placement_group_table().values()
        if group["name"].startswith(f"pagewise/{executor}/") and group["state"] == "CREATED"
        for _, node in sorted(group["bundles_to_node_id"].items())
    ]


def followers() -> list[int]:
    """Processes of ranks other than rank 0, of executors that Ray's processes have started."""
    return [
        process.info["pid"]
        for process in psutil.process_iter(["pid", "ppid", "cmdline"])
        if "pagewise_executor.follower" in (process.info["cmdline"] or ()) and process.info["ppid"] in ours()
    ]


def test_what_cannot_run_is_said(deployment: Deployment) -> None:
    deployment.add_node(4)
    said = deployment.run("up", "--tensor-parallel=64")
    assert said.returncode == 1
    assert "--tensor-parallel 64: the cluster has room for 4 ranks, which take 1 CPU each" in said.stderr
    said = deployment.run("up", "/no/such/model", "--port=0")
    assert said.returncode == 1
    assert "cannot start" in said.stderr
    assert "/no/such/model" in said.stderr


def test_what_runs_without_a_controller_is_taken_over(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after ``pagewise up`` was interrupted between ending the controller and starting the next one."""
    deployment.add_node(5)
    monkeypatch.setenv("PAGEWISE_API_KEYS", "sk-operator")
    deployment.up("--executors=1")

    def loads() -> set[str]:
        return set(ray.get(ray.get_actor("controller").report.remote())["loads"])

    until(lambda: loads() == {"executor-0"}, "metrics are read, with a key of their own")
    before, kept = deployment.processes(), deployment.kept()
    said = deployment.run("status")
    assert said.returncode == 0, said.stderr
    options = parse_config(UpConfig, [*SIMULATED, "--executors=2"], prog="pagewise up", description="")
    plan = make_plan(options, gpus=False, keys=kept["keys"])
    ray.kill(ray.get_actor("controller"))
    # One that the last controller has made, and was ended before it could start it.
    actor = ray.remote(ProcessActor).options(name="executor-7", lifetime="detached", num_cpus=0)
    actor.remote("executor-7", plan.processes["executor"])
    said = deployment.run("up", *SIMULATED, "--executors=2", "--quantization=int8")
    assert (said.returncode, "--quantization none, and not int8" in said.stderr) == (1, True), said.stderr
    deployment.up("--executors=2")
    assert deployment.kept() == kept
    after = deployment.processes()
    assert sorted(after) == ["executor-0", "executor-7", "gateway-0", "scheduler-0"]
    assert {name: after[name].pid for name in before} == {name: one.pid for name, one in before.items()}


def test_a_controller_that_does_not_answer_is_said(deployment: Deployment) -> None:
    deployment.add_node(4)
    deployment.up("--executors=1")
    (controller,) = [
        process
        for process in psutil.process_iter(["cmdline"])
        if " ".join(process.info["cmdline"] or ()).startswith("ray::controller")
        or " ".join(process.info["cmdline"] or ()).startswith("ray::Controller")
    ]
    controller.suspend()
    try:
        said = deployment.run("status")
        assert (said.returncode, said.stderr) == (
            1,
            "pagewise status: the controller does not answer: Ray may be starting it again\n",
        )
    finally:
        controller.resume()


def test_what_dies_before_it_has_answered_is_tried_again_after_pauses(deployment: Deployment, tmp_path: Path) -> None:
    deployment.add_node(4, env_vars={"PYTHONPATH": f"{tmp_path}:{os.environ['PYTHONPATH']}"})
    deployment.up("--executors=1")
    broken = tmp_path / "pagewise"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise ImportError('no Pagewise on this node')")
    ray.kill(ray.get_actor("executor-0"))
    until(lambda: "; the next one may start in 4 s" in deployment.decisions(), "three have died")
    assert "no Pagewise on this node" in deployment.decisions()
    assert ray.get(ray.get_actor("controller").report.remote())["failing"] == ["executor"]
    said = deployment.run("status")
    assert (said.returncode, "executor: the last ones died before they answered" in said.stdout) == (3, True), (
        said.stdout
    )
    shutil.rmtree(broken)
    until(lambda: deployment.ready("executor"), "an executor")
    assert ray.get(ray.get_actor("controller").report.remote())["failing"] == []
