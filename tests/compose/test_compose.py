"""``docker compose up`` as a user runs it: build, scale, stream, lose an executor and the scheduler, tear down."""

import json
import os
import re
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_TOKENS = 900
"""Enough for streams to run on for seconds."""

SERVICES = {"scheduler", "gateway", "executor"}
pytestmark = [pytest.mark.compose, pytest.mark.timeout(1500)]


def run(*command: str, environ: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=ROOT, env=os.environ | (environ or {}), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def inspect(container: str, template: str) -> str:
    return run("docker", "inspect", "--format", template, container)


class Stack:
    """The project of ``compose.yaml`` under a name and a port of its own, so that it disturbs no other."""

    def __init__(self, **options: str) -> None:
        """``options``: more variables of the environment."""
        self._options = options
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.name = f"pagewise-test-{os.getpid()}-{self.port}"

    def compose(self, *arguments: str) -> str:
        environ = {
            "PAGEWISE_HTTP_PORT": str(self.port),
            "PAGEWISE_GATEWAYS": "2",
            "PAGEWISE_KV_MEMORY": "8MiB",
            "PAGEWISE_HOST_MEMORY": "32MiB",
            "PAGEWISE_RECOVERY": "swap",
            **self._options,
        }
        return run("docker", "compose", "-p", self.name, *arguments, environ=environ)

    def metric(self, name: str) -> float:
        """The sum of the samples that begin so."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"pagewise_{name}"))

    def gateways_joined(self) -> set[str]:
        """The names of the gateways that the scheduler has heard from."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=5) as answer:
            text = answer.read().decode()
        return set(re.findall(r'^pagewise_gateway_resident_memory_bytes\{gateway="([^"]+)"', text, re.MULTILINE))

    def executors_ready(self) -> int:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as answer:
                return int(json.load(answer)["executors"])
        except OSError:
            return 0

    def wait_for_executors(self, count: int, seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while (ready := self.executors_ready()) != count:
            assert time.monotonic() < deadline, f"{ready} executors are ready, not {count}"
            time.sleep(0.5)

    def stream(self, prompt: str, max_tokens: int) -> str:
        """The text of a streamed greedy completion.

        Raises:
            OSError: it was cut off.
        """
        return self.answer(prompt, max_tokens)[0]

    def answer(self, prompt: str, max_tokens: int) -> tuple[str, int]:
        """The same, and how many tokens of the prompt were cached."""
        body = {
            "model": "pagewise-demo",
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            lines = [line.decode().strip() for line in answer if line.strip()]
        if not lines or lines.pop() != "data: [DONE]":  # Python takes an end without the last chunk for the end
            raise ConnectionError("the stream was cut off")
        *events, last = [json.loads(line.removeprefix("data: ")) for line in lines]
        text = "".join(event["choices"][0]["text"] for event in events)
        return text, last["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    stack = Stack()
    try:
        # --wait: until every health check is content.
        stack.compose("up", "--build", "--detach", "--wait", "--scale", "executor=3")
        yield stack
    finally:
        print(stack.compose("logs", "--tail", "40"))
        stack.compose("down", "--volumes", "--rmi", "local", "--timeout", "20")


def kill_containers(*containers: str) -> None:
    """SIGKILL to their first processes: `docker kill` would count as stopped on purpose."""
    kill_processes(containers[0], *(inspect(container, "{{.State.Pid}}") for container in containers))


def kill_processes(container: str, *pids: str) -> None:
    """SIGKILL from outside, in the host's numbers: inside a container its first process is immune."""
    code = f"import os; [os.kill(pid, 9) for pid in ({', '.join(pids)},)]"
    options = ["--rm", "--pid=host", "--user=0", "--entrypoint=python"]
    run("docker", "run", *options, inspect(container, "{{.Image}}"), "-c", code)


def gateway_processes(container: str) -> list[str]:
    """Their numbers on the host."""
    table = run("docker", "top", container, "-o", "pid,args").splitlines()
    return [line.split()[0] for line in table if "pagewise_gateway.main" in line]


def repeat(stack: Stack, prompt: str, text: str, ended: threading.Event) -> None:
    """Stream a prompt again and again until ``ended``, with the same ``text`` each time."""
    while not ended.is_set():
        assert stack.stream(prompt, MAX_TOKENS) == text


def stream_while(stack: Stack, disturb: Callable[[], None]) -> None:
    """Streams that are disturbed end like earlier ones."""
    prompts = [f"import os\n\ndef function_{number}(" for number in range(6)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        expected = list(pool.map(lambda prompt: stack.stream(prompt, MAX_TOKENS), prompts))
        assert all(expected)
        ended = threading.Event()
        streams = [pool.submit(repeat, stack, *one, ended) for one in zip(prompts, expected, strict=True)]
        try:
            disturb()
        finally:
            ended.set()
        for stream in streams:
            stream.result()


def wait_for_restart(container: str) -> None:
    deadline = time.monotonic() + 60
    while inspect(container, "{{.RestartCount}}") == "0":
        assert time.monotonic() < deadline, "it was not started again"
        time.sleep(0.2)


def test_three_executors_serve_and_one_that_is_killed_costs_nobody_a_token_and_returns(stack: Stack) -> None:
    stack.wait_for_executors(3)
    victim = stack.compose("ps", "--quiet", "executor").split()[0]
    stream_while(stack, lambda: kill_containers(victim))
    wait_for_restart(victim)
    stack.wait_for_executors(3)


def test_a_scheduler_that_is_killed_costs_nobody_a_token_and_returns(stack: Stack) -> None:
    victim = stack.compose("ps", "--quiet", "scheduler")
    stream_while(stack, lambda: kill_containers(victim))
    wait_for_restart(victim)
    stack.wait_for_executors(3)


def test_a_gateway_that_is_killed_costs_its_own_streams_alone_and_returns(stack: Stack) -> None:
    container = stack.compose("ps", "--quiet", "gateway")
    both = stack.gateways_joined()
    assert len(both) == 2
    prompts = [f"import os\n\nclass Number{number}:" for number in range(16)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        expected = list(pool.map(lambda prompt: stack.stream(prompt, MAX_TOKENS), prompts))
        ended = threading.Event()
        streams = [pool.submit(repeat, stack, *one, ended) for one in zip(prompts, expected, strict=True)]
        try:
            while stack.metric("num_requests_running") < len(prompts):
                assert not any(stream.done() for stream in streams), "a stream failed"
                time.sleep(0.05)
            victim, other = gateway_processes(container)
            kill_processes(container, victim)
        finally:
            ended.set()
        broken = 0
        for stream in streams:
            try:
                stream.result()
            except OSError:
                broken += 1
    assert 0 < broken < len(prompts)
    deadline = time.monotonic() + 30
    while len(now := gateway_processes(container)) < 2 or stack.gateways_joined() != both:
        assert time.monotonic() < deadline, "it was not started again"
        time.sleep(0.2)
    assert other in now
    assert victim not in now
    assert inspect(container, "{{.RestartCount}}") == "0", "its own supervisor starts it"


def test_a_container_of_gateways_that_is_killed_returns(stack: Stack) -> None:
    container = stack.compose("ps", "--quiet", "gateway")
    kill_containers(container)
    wait_for_restart(container)
    stack.wait_for_executors(3)
    assert stack.stream("import os", 20)


def test_executors_that_are_killed_at_once_find_what_they_had_in_host_memory(stack: Stack) -> None:
    def num_takeovers() -> int:
        return stack.compose("logs", "executor").count("blocks in /host-memory/pagewise-10001-")

    deadline = time.monotonic() + 300
    with ThreadPoolExecutor(6) as pool:
        while stack.metric('kv_block_events_total{event="demoted"') < 100:
            assert time.monotonic() < deadline, "nothing went to the host"
            prompts = [str(uuid.uuid4()) * 30 for _ in range(6)]
            assert all(pool.map(lambda prompt: stack.stream(prompt, 20), prompts))
    before = num_takeovers()
    kill_containers(*stack.compose("ps", "--quiet", "executor").split())
    while num_takeovers() == before:
        assert time.monotonic() < deadline, "nobody took over what those that were killed had left"
        time.sleep(0.5)
    stack.wait_for_executors(3)


def test_images_run_as_an_ordinary_user_and_hold_no_more_than_they_need(stack: Stack) -> None:
    for service in SERVICES:
        assert stack.compose("exec", "-T", service, "id", "-u") == "10001"
    for service in ("gateway", "executor"):
        stack.compose("exec", "-T", service, "sh", "-c", "echo > /models/writable && rm /models/writable")
    for service, absent in (
        ("gateway", ["torch"]),
        ("scheduler", ["torch", "transformers", "tokenizers", "aiohttp"]),
        ("executor", ["triton", "nvidia"]),
    ):
        code = f"import importlib.util as u; print([name for name in {absent} if u.find_spec(name)])"
        assert stack.compose("exec", "-T", service, "python", "-c", code) == "[]"
    code = "import torch; print(torch.version.cuda, torch.backends.cuda.is_built())"
    assert stack.compose("exec", "-T", "executor", "python", "-c", code) == "None False"
    search = "find / -xdev -name 'libcud*' -o -xdev -name 'libcublas*' -o -xdev -name 'libtriton*'"
    assert stack.compose("exec", "-T", "executor", "sh", "-c", f"{search} 2>/dev/null || true") == ""


def test_images_say_what_they_were_built_of_and_how_large_they_are(stack: Stack) -> None:
    """``make images``: everything has been built already, so that it only puts the labels on."""
    project = f"{stack.name}-labelled"
    try:
        printed = run(
            ".ci/images.sh", environ={"COMPOSE_PROJECT_NAME": project, "SOURCE": "https://example.org/pagewise"}
        )
        sizes = dict(re.findall(rf"^{project}-(\w+) +(\d+) MB  sha256:\w+$", printed, re.MULTILINE))
        assert sizes.keys() == SERVICES
        revision = run("git", "rev-parse", "HEAD")
        version = run("git", "grep", "-h", "^version = ", "HEAD", "--", "pyproject.toml").split('"')[1]
        for service, megabytes in sizes.items():
            image = f"{project}-{service}"
            labels = json.loads(inspect(image, "{{json .Config.Labels}}"))
            told = {name.removeprefix("org.opencontainers.image."): value for name, value in labels.items()}
            assert told["revision"].removesuffix("-dirty") == revision
            assert told["version"] == version
            assert told["source"] == "https://example.org/pagewise"
            assert told["title"] == f"Pagewise {service}"
            assert told["licenses"] == "Apache-2.0"
            assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", told["created"])
            assert int(megabytes) == round(int(inspect(image, "{{.Size}}")) / 1e6)
    finally:
        run("docker", "image", "rm", "--force", *(f"{project}-{service}" for service in (*SERVICES, "keys")))


def test_services_are_healthy_only_while_they_are_reached(stack: Stack) -> None:
    check = ("python", "-m", "pagewise.healthcheck")
    for service, variable, elsewhere in (
        ("executor", "PAGEWISE_SCHEDULER", "tcp://scheduler:1"),
        ("scheduler", "PAGEWISE_LISTEN", "tcp://0.0.0.0:1"),
        ("gateway", "PAGEWISE_PORT", "1"),
    ):
        stack.compose("exec", "-T", service, *check, service)
        with pytest.raises(AssertionError):
            stack.compose("exec", "-T", "-e", f"{variable}={elsewhere}", service, *check, service)


def test_each_service_holds_its_own_key_and_no_other(stack: Stack) -> None:
    for service in SERVICES:
        mode = stack.compose("exec", "-T", service, "stat", "-c", "%a %u", f"/keys/{service}/{service}.key_secret")
        assert mode == "600 10001"
        for other in SERVICES - {service}:
            stack.compose("exec", "-T", service, "test", "!", "-e", f"/keys/{other}/{other}.key_secret")


def test_an_executor_without_a_key_is_refused(stack: Stack) -> None:
    plain = ["-e", "PAGEWISE_KEYS=", "-e", "PAGEWISE_PLAINTEXT=1", "executor", "pagewise-executor", "--simulate"]
    with pytest.raises(AssertionError, match="asks for a key and there is none"):
        stack.compose("run", "--rm", "-T", "--no-deps", *plain)
    assert stack.metric("wire_connections_refused_total{") >= 1


def test_services_stop_cleanly_when_asked_to(stack: Stack) -> None:
    containers = stack.compose("ps", "--quiet").split()
    with ThreadPoolExecutor(1) as pool:
        # The gateway's containers stop first. Longer than its time to end streams, this one is cut off, but properly.
        stream = pool.submit(stack.stream, "import os", 2000)
        time.sleep(1.0)
        stack.compose("stop", "--timeout", "20")
        assert stream.result()
    assert [inspect(container, "{{.State.ExitCode}}") for container in containers] == ["0"] * 5


def image_of(service: str, files: str = "compose.yaml") -> str:
    """The image of a service that is not built, or the one that a variable names in its place; skips without it."""
    config = json.loads(run("docker", "compose", "config", "--format=json", service, environ={"COMPOSE_FILE": files}))
    image = str(config["services"][service]["image"])
    found = subprocess.run(["docker", "pull", "--quiet", image], capture_output=True, text=True)
    if found.returncode and subprocess.run(["docker", "image", "inspect", image], capture_output=True).returncode:
        pytest.skip(f"there is no image {image}: {found.stderr.strip()} ({service.upper()}_IMAGE names another one)")
    return image


def test_clients_reach_gateways_through_the_proxy_only() -> None:
    files = "compose.yaml:compose.proxy.yaml"
    image_of("proxy", files)
    proxied = Stack(COMPOSE_FILE=files)
    try:
        proxied.compose("up", "--build", "--detach", "--wait")
        proxied.wait_for_executors(1)
        assert proxied.stream("import os", 20)
        gateway = proxied.compose("ps", "--quiet", "gateway")
        assert "HostPort" not in inspect(gateway, "{{json .NetworkSettings.Ports}}")
        with pytest.raises(urllib.error.HTTPError) as raised:
            proxied.stream("a" * 5 * 2**20, 1)
        with raised.value as refused:
            assert (refused.code, refused.headers["Server"]) == (413, "nginx")
    finally:
        print(proxied.compose("logs", "--tail", "40"))
        proxied.compose("down", "--volumes", "--rmi", "local", "--timeout", "20")


def test_a_store_keeps_what_everything_else_has_forgotten() -> None:
    image = image_of("store")
    stack = Stack(PAGEWISE_STORE="redis://:open-sesame@store:6379/0", STORE_PASSWORD="open-sesame", STORE_IMAGE=image)
    up = ("--profile", "store", "up", "--build", "--detach", "--wait")
    prompt = "\n".join(f"def function_{number}(value): return value + {number}" for number in range(40))
    try:
        stack.compose(*up)
        text, cached = stack.answer(prompt, 16)
        assert cached == 0
        deadline = time.monotonic() + 30
        while (written := stack.metric('kv_block_events_total{event="written"')) < len(prompt) // 128:
            assert time.monotonic() < deadline, written
            time.sleep(0.2)
        stack.compose("rm", "--stop", "--force", "executor", "scheduler", "gateway")
        stack.compose(*up)
        again, cached = stack.answer(prompt, 16)
        assert again == text
        assert cached > len(prompt) // 8
    finally:
        print(stack.compose("--profile", "store", "logs", "--tail", "40"))
        stack.compose("--profile", "store", "down", "--volumes", "--timeout", "20")
