"""The pods of ``overlays/cpu`` as containers: commands, variables, keys, rights, limits, probes and ends, without a
cluster. Docker replaces the kubelet, and its names replace services; network policies and autoscalers are left out.
"""

import io
import json
import os
import re
import subprocess
import tarfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pagewise.keys import keys as make_keys

from tests.deploy.kustomize import Resource, build, container_of, environment, pod_spec, workloads

ROOT = Path(__file__).parents[2]
OVERLAY = ROOT / "deploy" / "overlays" / "cpu"
SERVICES = ("scheduler", "gateway", "executor")
API_KEY = "sk-of-the-test"
PIP = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_TRUSTED_HOST", "PYTHON_IMAGE")

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1500)]


def docker(*arguments: str, send: bytes | None = None) -> str:
    environ = os.environ | {"DOCKER_BUILDKIT": "1"}
    done = subprocess.run(("docker", *arguments), cwd=ROOT, env=environ, input=send, capture_output=True)
    assert done.returncode == 0, (done.stdout + done.stderr).decode()
    return done.stdout.decode().strip()


def logs(name: str) -> str:
    command = ("docker", "logs", "--tail", "40", name)
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout


def size(quantity: str) -> str:
    """A quantity of memory as Docker writes it: 2Gi is 2g."""
    return quantity.removesuffix("i").lower()


class Pods:
    """Containers as the manifests describe them, on a network of their own. They are named after their pods."""

    def __init__(self, secrets: dict[str, dict[str, bytes]]) -> None:
        self.name = f"pagewise-pods-{os.getpid()}"
        self._secrets = secrets
        self._workloads = workloads(OVERLAY)
        self._containers: list[str] = []
        self._volumes: list[str] = []

    def build(self) -> None:
        """The images, as deploy/README.md builds them, and the network."""
        docker("network", "create", self.name)
        for service in SERVICES:
            arguments = [argument for name in PIP for argument in ("--build-arg", name)]
            docker("build", *arguments, "--target", service, "-t", self.image(service), ".")

    def image(self, service: str) -> str:
        return f"{self.name}-{service}"

    def start(self, service: str, pod: str) -> str:
        """A pod of one service; returns its container."""
        resource = self._workloads[service]
        container, spec = container_of(resource), pod_spec(resource)
        assert spec is not None
        rights = spec["securityContext"]
        limits = container["resources"]["limits"]
        name = f"{self.name}-{pod}"
        options = ["--name", name, "--hostname", pod, "--network", self.name, "--network-alias", pod]
        options += ["--user", f"{rights['runAsUser']}:{rights['runAsGroup']}", "--memory", size(limits["memory"])]
        options += ["--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges:true"]
        if "cpu" in limits:
            options += ["--cpus", limits["cpu"]]
        for alias in services_of(resource):
            options += ["--network-alias", alias]
        for port in container["ports"]:
            if port["name"] == "http":
                options += ["--publish", f"127.0.0.1::{port['containerPort']}"]
        fields = {"metadata.name": pod, "status.podIP": pod}  # by its name others reach it as well
        for variable, value in environment(OVERLAY, service, fields).items():
            options += ["--env", f"{variable}={value}"]
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        for mount in container["volumeMounts"]:
            options += self._mount(volumes[mount["name"]], mount["mountPath"], rights, mount.get("readOnly", False))
        docker("create", *options, self.image(service), *container.get("command", []))
        self._containers.append(name)
        docker("start", name)
        return name

    def _mount(self, volume: dict[str, Any], path: str, rights: dict[str, int], read_only: bool) -> list[str]:
        """The options that mount a volume: an empty one that the group may write, or a secret that it may read."""
        group = rights["fsGroup"]
        if "emptyDir" in volume:
            limit = size(volume["emptyDir"]["sizeLimit"])
            return ["--tmpfs", f"{path}:size={limit},gid={group},mode=2770,exec"]
        secret = volume["secret"]
        values = self._secrets[secret["secretName"]]
        items = secret.get("items") or [{"key": key, "path": key} for key in values]
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            for item in items:
                entry = tarfile.TarInfo(item["path"])
                entry.size, entry.mode, entry.gid = len(values[item["key"]]), secret["defaultMode"], group
                archive.addfile(entry, io.BytesIO(values[item["key"]]))
        name = f"{self.name}-{uuid.uuid4().hex}"
        self._volumes.append(name)
        unpack = ["--user", "0", "--volume", f"{name}:/out", "--entrypoint", "tar", self.image("scheduler")]
        docker("run", "--rm", "--interactive", *unpack, "-x", "-p", "-C", "/out", send=packed.getvalue())
        return ["--volume", f"{name}:{path}{':ro' if read_only else ''}"]

    def url(self, name: str) -> str:
        return f"http://{docker('port', name, '8000')}"

    def passes(self, name: str, probe: dict[str, Any]) -> bool:
        """The kubelet's result."""
        if "httpGet" in probe:
            try:
                with urllib.request.urlopen(
                    self.url(name) + probe["httpGet"]["path"], timeout=probe.get("timeoutSeconds", 1)
                ):
                    return True
            except OSError:
                return False
        command = ["docker", "exec", name, *probe["exec"]["command"]]
        return subprocess.run(command, capture_output=True, timeout=60).returncode == 0

    def wait_until_ready(self, service: str, name: str) -> None:
        """Until its start-up probe passes, in the time that it has for that, and then its readiness probe."""
        container = container_of(self._workloads[service])
        startup = container["startupProbe"]
        seconds = {"startupProbe": startup["periodSeconds"] * startup["failureThreshold"], "readinessProbe": 60}
        for probe, time_out in seconds.items():
            deadline = time.monotonic() + time_out
            while not self.passes(name, container[probe]):
                assert time.monotonic() < deadline, f"{name}: {probe} fails\n{logs(name)}"
                time.sleep(1)  # each look takes half a second of CPU time

    def stop(self, service: str, name: str) -> int:
        """End a pod as the kubelet does, within the time that it has; returns the exit code of its process."""
        spec = pod_spec(self._workloads[service])
        assert spec is not None
        begun = time.monotonic()
        if hook := container_of(self._workloads[service]).get("lifecycle", {}).get("preStop"):
            docker("exec", name, *hook["exec"]["command"])
        left = spec["terminationGracePeriodSeconds"] - (time.monotonic() - begun)
        docker("stop", "--time", str(int(left)), name)
        return int(docker("inspect", "--format", "{{.State.ExitCode}}", name))

    def close(self) -> None:
        for name in self._containers:
            print(name, logs(name), sep="\n")
            docker("rm", "--force", name)
        for name in self._volumes:
            docker("volume", "rm", name)
        docker("network", "rm", self.name)
        docker("rmi", *(self.image(service) for service in SERVICES))


def services_of(resource: Resource) -> Iterator[str]:
    """The services that lead to the pods of a resource."""
    labels = resource["spec"]["template"]["metadata"]["labels"]
    for one in build(OVERLAY):
        if one["kind"] == "Service" and one["spec"]["selector"].items() <= labels.items():
            yield one["metadata"]["name"]


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pods]:
    folder = tmp_path_factory.mktemp("keys")
    # As deploy/README.md makes the secrets.
    assert make_keys(["--keys", str(folder), "init"]) == 0
    readme = (ROOT / "deploy" / "README.md").read_text()
    files = re.findall(r"--from-file=keys/(\S+)", readme)
    secrets = {
        "pagewise-keys": {Path(file).name: (folder / file).read_bytes() for file in files},
        "pagewise-api-keys": {"keys": f"first: {API_KEY}\n".encode()},
    }
    pods = Pods(secrets)
    try:
        pods.build()
        yield pods
    finally:
        pods.close()


def stream(url: str, prompt: str, max_tokens: int, key: str = API_KEY) -> str:
    """The text of a streamed greedy completion; one that is cut off fails."""
    body = {"model": "pagewise-demo", "prompt": prompt, "max_tokens": max_tokens}
    body |= {"temperature": 0, "ignore_eos": True, "stream": True}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        lines = [line.decode().strip() for line in answer if line.strip()]
    assert lines.pop() == "data: [DONE]"
    return "".join(json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in lines)


def running(pool: ThreadPoolExecutor, url: str, expected: dict[str, str], gateway: str) -> list[Future[str]]:
    """Streams of all prompts at ``url`` that run at once, by the metrics of ``gateway``, whose network policies let its
    clients in. If some have ended meanwhile, with the ``expected`` texts, all are asked again."""
    while True:
        streams = [pool.submit(stream, url, prompt, 600) for prompt in expected]
        while not any(one.done() for one in streams):
            with urllib.request.urlopen(f"{gateway}/metrics", timeout=5) as answer:
                text = answer.read().decode()
            found = re.search(r"^pagewise_num_requests_running\S* (\S+)", text, re.MULTILINE)
            if found is not None and float(found[1]) == len(streams):
                return streams
            time.sleep(0.05)
        assert [one.result() for one in streams] == [*expected.values()]


def test_pods_become_ready_serve_and_end_in_the_time_they_have(pods: Pods) -> None:
    gateway, other = pods.start("gateway", "pagewise-gateway-a"), pods.start("gateway", "pagewise-gateway-b")
    executors = [pods.start("executor", f"pagewise-executor-{number}") for number in range(2)]
    url = pods.url(gateway)
    probes = container_of(workloads(OVERLAY)["gateway"])
    deadline = time.monotonic() + 60
    while not pods.passes(gateway, probes["livenessProbe"]):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert not pods.passes(gateway, probes["readinessProbe"]), "there is no scheduler yet"
    scheduler = pods.start("scheduler", "pagewise-scheduler-a")
    pods.wait_until_ready("scheduler", scheduler)
    for executor in executors:
        pods.wait_until_ready("executor", executor)
    for one in (gateway, other):
        pods.wait_until_ready("gateway", one)

    with pytest.raises(urllib.error.HTTPError, match="401"):
        stream(url, "import os", 5, key="sk-of-somebody-else")
    prompts = [f"import os\n\ndef function_{number}(" for number in range(4)]
    with ThreadPoolExecutor(2 * len(prompts)) as pool:
        texts = list(pool.map(lambda prompt: stream(url, prompt, 600), prompts))
        expected = dict(zip(prompts, texts, strict=True))

        # A scheduler that is replaced: the next one starts when it has ended.
        streams = running(pool, url, expected, url)
        assert pods.stop("scheduler", scheduler) == 0
        pods.wait_until_ready("scheduler", pods.start("scheduler", "pagewise-scheduler-b"))
        assert [one.result() for one in streams] == texts

        # A pod of an executor that ends.
        streams = running(pool, url, expected, url)
        assert pods.stop("executor", executors[0]) == 0
        assert [one.result() for one in streams] == texts

        # A pod of a gateway that ends lets its streams end.
        streams = running(pool, url, expected, pods.url(other))
        assert pods.stop("gateway", gateway) == 0
        assert [one.result() for one in streams] == texts
    assert stream(pods.url(other), prompts[0], 20)
    assert pods.stop("gateway", other) == 0
    assert pods.stop("executor", executors[1]) == 0
