"""``pagewise serve`` and ``pagewise gateways`` around stand-ins for the services: all starts and ends."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pagewise import process, supervisor
from pagewise.process import Service
from pagewise.serve import reserved_port
from pagewise.supervisor import Group, StartError, Supervisor
from pagewise_shared.config import GatewayConfig
from pagewise_shared.service_process import CANNOT_START
from pagewise_shared.service_status import ServiceStatus, read_status

from tests.cli.stand_ins import StandIns

PORT_OPTION = "--port="


class Running:
    """A command of ``pagewise`` around stand-ins."""

    def __init__(self, stand_ins: StandIns, arguments: list[str], environment: dict[str, str]) -> None:
        self.stand_ins = stand_ins
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pagewise.main", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | stand_ins.environment | environment,
        )

    def wait_for(self, what: str, counts: dict[str, int], seconds: float = 20.0) -> None:
        """Wait until processes have written a line so many times, by name."""
        deadline = time.monotonic() + seconds
        while (now := Counter(name for name, _ in self.stand_ins.told(what))) != Counter(counts):
            assert time.monotonic() < deadline, f"{what}: {now}, not {counts}"
            assert self.process.poll() is None, self.process.communicate()[0]
            time.sleep(0.05)

    def pid(self, name: str) -> int:
        """Of the process that has started last under this name."""
        return int(json.loads([details for who, details in self.stand_ins.told("started") if who == name][-1])[0])

    def arguments(self, name: str) -> list[str]:
        return [
            str(one) for who, details in self.stand_ins.told("started") if who == name for one in json.loads(details)
        ]

    def port(self, name: str) -> int:
        """The port of a gateway's arguments, at each of its starts."""
        (port,) = {one.removeprefix(PORT_OPTION) for one in self.arguments(name) if one.startswith(PORT_OPTION)}
        return int(port)

    def end(self, *signals: signal.Signals) -> tuple[int, str]:
        """Exit code and output after these signals, a moment apart."""
        for number in signals:
            self.process.send_signal(number)
            time.sleep(0.5)
        output, _ = self.process.communicate(timeout=30)
        return self.process.returncode, output


Start = Callable[..., Running]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Running] = []

    def run(*arguments: str, **environment: str) -> Running:
        started.append(Running(StandIns(tmp_path), list(arguments), environment))
        return started[-1]

    yield run
    for one in started:
        one.process.kill()
        one.process.communicate()


ALL = {"scheduler": 1, "gateway-0": 1, "gateway-1": 1, "executor-0": 1, "executor-1": 1}
SERVE = ("serve", "--port=0", "--gateways=2", "--executors=2", "--device=cpu")


def test_each_service_gets_its_own_options_and_all_of_them_the_same_endpoints(start: Start) -> None:
    running = start(
        *SERVE, "--max-n=3", "--max-waiting=7", "--block-size=8", "--max-num-seqs=5", "--shutdown-timeout=1"
    )
    running.wait_for("started", ALL)
    scheduler = dict(one[2:].partition("=")[::2] for one in running.arguments("scheduler")[1:])
    given = {"listen", "listen-gateways", "max-waiting", "max-num-seqs"}
    assert scheduler.keys() == given | {"gateways-end-any-request", "service-status"}
    for number in range(2):
        gateway, executor = running.arguments(f"gateway-{number}"), running.arguments(f"executor-{number}")
        assert {"--max-n=3", "--shutdown-timeout=1.0", "--reuse-port"} < set(gateway)
        assert f"--scheduler={scheduler['listen-gateways']}" in gateway
        assert {"--block-size=8", "--max-num-seqs=5", "--device=cpu"} < set(executor)
        assert f"--scheduler={scheduler['listen']}" in executor
    assert running.port("gateway-0") == running.port("gateway-1") != 0
    assert {scheduler["listen"].split(":")[0], scheduler["listen-gateways"].split(":")[0]} == {"ipc"}


def test_a_misspelt_variable_is_told_once_and_its_services_do_not_see_it(start: Start) -> None:
    running = start(*SERVE, PAGEWISE_MAX_NUM_SEQ="5", PAGEWISE_LISTN="x")
    running.wait_for("started", ALL)
    assert not any("PAGEWISE_MAX" in Path(f"/proc/{running.pid(name)}/environ").read_text() for name in ALL)
    _, output = running.end(signal.SIGINT)
    assert output.count("PAGEWISE_MAX_NUM_SEQ is unknown and has no effect: did you mean PAGEWISE_MAX_NUM_SEQS?") == 1
    assert output.count("PAGEWISE_LISTN") == 1


def test_one_gateway_shares_its_port_with_nobody(start: Start) -> None:
    running = start("serve", "--port=0", "--executors=0")
    running.wait_for("started", {"scheduler": 1, "gateway-0": 1})
    assert "--reuse-port" not in running.arguments("gateway-0")


def test_secrets_do_not_show_on_command_lines(start: Start) -> None:
    running = start(*SERVE, PAGEWISE_API_KEYS="alice: sk-1", PAGEWISE_MAX_N="9")
    running.wait_for("started", ALL)
    assert "sk-1" not in running.stand_ins.log.read_text()
    assert "--max-n=9" in running.arguments("gateway-1")
    environment = Path(f"/proc/{running.pid('gateway-1')}/environ").read_bytes().split(b"\0")
    assert b"PAGEWISE_API_KEYS=alice: sk-1" in environment
    assert not [one for one in environment if one.startswith(b"PAGEWISE_MAX")]
    assert b"sk-1" not in Path(f"/proc/{running.pid('executor-0')}/environ").read_bytes()


def test_whatever_dies_is_started_again_at_its_place(start: Start) -> None:
    running = start(*SERVE)
    running.wait_for("started", ALL)
    for name in ("scheduler", "gateway-1", "executor-0"):
        os.kill(running.pid(name), signal.SIGKILL)
    running.wait_for("started", ALL | {"scheduler": 2, "gateway-1": 2, "executor-0": 2})
    arguments = running.arguments("scheduler")
    assert arguments[1 : len(arguments) // 2] == arguments[len(arguments) // 2 + 1 :], "the same endpoints"
    assert running.port("gateway-1") == running.port("gateway-0")
    code, output = running.end(signal.SIGINT)
    assert code == 0
    assert "scheduler ended with exit code -9, starting it again in 0.5 s" in output


def test_a_process_that_is_stopped_from_outside_is_replaced_without_a_warning(start: Start) -> None:
    running = start(*SERVE)
    running.wait_for("started", ALL)
    os.kill(running.pid("executor-0"), signal.SIGTERM)
    running.wait_for("started", ALL | {"executor-0": 2})
    _, output = running.end(signal.SIGINT)
    (line,) = (line for line in output.splitlines() if "executor-0 was stopped" in line)
    assert "INFO" in line
    assert "starting it again in 0.5 s; for fewer, restart with a lower --executors" in line
    assert "WARNING" not in output


def test_streams_may_end_before_executors_and_the_scheduler_are_stopped(start: Start) -> None:
    running = start(*SERVE)
    running.wait_for("started", ALL)
    code, output = running.end(signal.SIGTERM)
    assert code == 0
    lines = [line.split() for line in running.stand_ins.log.read_text().splitlines()]
    stops = [(name.split("-")[0], what, *details) for name, what, *details in lines if what != "started"]
    # SIGINT: as SIGTERM would, but no gateway leaves its port to the others, and no executor moves its work to others.
    assert stops[:4] == [("gateway", "told", "SIGINT")] * 2 + [("gateway", "ended")] * 2
    assert stops[4:8] == [("executor", "told", "SIGINT")] * 2 + [("executor", "ended")] * 2
    assert stops[8:] == [("scheduler", "told", "SIGTERM"), ("scheduler", "ended")]
    assert output.count("| a last word") == 5, "what is said at the end is shown"


def test_a_second_signal_ends_everything_at_once(start: Start) -> None:
    running = start(*SERVE, STAND_IN_SECONDS="60")
    running.wait_for("started", ALL)
    pids = [running.pid(name) for name in ALL]
    began = time.monotonic()
    running.process.send_signal(signal.SIGINT)
    running.wait_for("told", {"gateway-0": 1, "gateway-1": 1})
    code, _ = running.end(signal.SIGINT)
    assert code == 130
    assert time.monotonic() - began < 30.0
    assert {name for name, _ in running.stand_ins.told("told")} == {"gateway-0", "gateway-1"}
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_what_ignores_its_signal_is_killed(start: Start) -> None:
    running = start(
        "gateways", "--port=0", "--gateways=1", "--shutdown-timeout=0.1", STAND_IN_DEAF=socket.gethostname()
    )
    name = f"{socket.gethostname()}-0"
    running.wait_for("started", {name: 1})
    pid = running.pid(name)
    code, _ = running.end(signal.SIGTERM)
    assert code == 0
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("broken", ["scheduler", "gateway-1", "executor-0"])
def test_one_that_cannot_start_ends_everything_and_its_reason_is_shown(start: Start, broken: str) -> None:
    running = start(*SERVE, STAND_IN_BROKEN=broken, STAND_IN_UNREADY="1")
    output, _ = running.process.communicate(timeout=30)
    assert running.process.returncode == 1
    assert "no such model" in output
    assert f"{broken} cannot start" in output
    assert not [name for name in ALL if name in dict(running.stand_ins.told("started")) and alive(running.pid(name))]


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_gateways_alone_answer_on_one_port_for_a_scheduler_elsewhere(start: Start) -> None:
    running = start("gateways", "--port=0", "--gateways=2", "--scheduler=tcp://192.0.2.1:5758", "--plaintext")
    names = [f"{socket.gethostname()}-{number}" for number in range(2)]
    running.wait_for("started", dict.fromkeys(names, 1))
    assert all("--scheduler=tcp://192.0.2.1:5758" in running.arguments(name) for name in names)
    url, answered = f"http://127.0.0.1:{running.port(names[0])}", set()
    deadline = time.monotonic() + 20
    while answered != set(names):
        assert time.monotonic() < deadline, answered
        with urllib.request.urlopen(url, timeout=5) as answer:
            answered.add(answer.read().decode())
    assert running.process.stdout is not None
    assert any(f"{url} is up" in line for line in running.process.stdout)
    code, _ = running.end(signal.SIGTERM)
    assert code == 0


def test_the_line_it_prints_names_the_model_and_the_address(start: Start) -> None:
    running = start("serve", "--port=0", "--served-model-name=small", "--gateways=2", PAGEWISE_API_KEYS="sk-1")
    running.wait_for("started", {"scheduler": 1, "gateway-0": 1, "gateway-1": 1, "executor-0": 1})
    assert running.process.stdout is not None
    line = next(line for line in running.process.stdout if "curl" in line)
    assert f"http://127.0.0.1:{running.port('gateway-0')}/v1/completions" in line
    assert '"model": "small"' in line
    assert "$PAGEWISE_API_KEY" in line


@pytest.mark.parametrize("count", ["1", "2"])
def test_a_port_that_somebody_else_listens_on_is_not_shared(start: Start, count: str) -> None:
    with socket.socket() as taken:
        # Another user of SO_REUSEPORT, as another ``pagewise serve`` is, would be joined without a word.
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        running = start("serve", f"--port={port}", "--gateways", count)
        output, _ = running.process.communicate(timeout=30)
    assert running.process.returncode == 1
    assert f"cannot serve HTTP on 127.0.0.1 port {port}" in output
    assert not list(running.stand_ins.told("started"))


def test_a_port_is_reserved_while_gateways_come_and_go() -> None:
    def listen(port: int) -> socket.socket:
        return socket.create_server(("127.0.0.1", port))  # with SO_REUSEADDR, as gateways

    with reserved_port(GatewayConfig(port=0)) as port:
        for _ in range(2):
            with listen(port) as server, socket.create_connection(("127.0.0.1", port)):
                server.accept()[0].close()
        with listen(port), pytest.raises(StartError), reserved_port(GatewayConfig(port=port)):
            pass
    with reserved_port(GatewayConfig(host="::1", port=0)) as port:
        assert port


async def test_one_that_keeps_dying_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_PAUSES", (0.01, 0.01))
    monkeypatch.setattr(supervisor, "_MOST_EARLY_ENDS", 2)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "dying.py").write_text("import sys; print('x'); sys.exit(3)")
    lives: list[str] = []

    async def serve(*, at_all: bool) -> None:
        if not at_all:
            await asyncio.Event().wait()

    group = Group([Service("dying", "dying", [], lives.append)], signal.SIGTERM)
    assert await Supervisor([group]).run(serve(at_all=False)) == 1
    assert len(lives) == 3
    # Also while others serve, if the option asks for it.
    assert await Supervisor([group], exit_on_failure=True).run(serve(at_all=True)) == 1
    assert len(lives) == 6


@pytest.mark.parametrize("code", [3, CANNOT_START])
async def test_one_that_keeps_dying_is_tried_again_while_others_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(process, "_PAUSES", (0.01, 0.02))
    monkeypatch.setattr(supervisor, "_MOST_EARLY_ENDS", 2)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "dying.py").write_text(
        f"import os, sys, time\nif not os.path.exists({str(tmp_path / 'mended')!r}): sys.exit({code})\n"
        "print('joined x', flush=True)\ntime.sleep(60)"
    )
    served = asyncio.Event()
    status = tmp_path / "status.json"
    dying = Service("dying", "dying", [])
    running = asyncio.create_task(Supervisor([Group([dying], signal.SIGTERM)], status).run(served.wait()))  # type: ignore[arg-type]
    served.set()

    async def until(condition: Callable[[ServiceStatus], bool]) -> ServiceStatus:
        async with asyncio.timeout(30):
            while not condition(found := read_status(status).get("dying", ServiceStatus())):
                assert not running.done()
                await asyncio.sleep(0.02)
        return found

    failing = await until(lambda found: found.restarts > 5 and bool(found.problem))
    assert ("cannot start" if code == CANNOT_START else f"with exit code {code}") in failing.problem
    (tmp_path / "mended").touch()
    assert (await until(lambda found: not found.problem)).restarts >= failing.restarts
    os.kill(os.getpid(), signal.SIGTERM)
    assert await running == 0
