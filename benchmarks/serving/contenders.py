"""The servers and engines that are compared: Pagewise, any OpenAI-compatible server, and engines in own processes."""

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import psutil

from benchmarks import environments
from benchmarks.processes import Served, spawn
from benchmarks.serving.clients import drive
from benchmarks.serving.workloads import Work

_FOLDER = Path(__file__).parent
_SEQUENCES = 16
"""That llama.cpp has room for, each with 512 tokens."""
_WARM_UP = [Work([11] * 8, 4)] * 4


@dataclass
class Round:
    """One run of a workload: seconds; CPU seconds of all processes that serve, if known; when tokens came, if known."""

    seconds: float
    cpu_seconds: float | None = None
    first_token: list[float] = field(default_factory=list)
    between_tokens: list[float] = field(default_factory=list)


class Contender(Protocol):
    """Something that generates tokens."""

    @property
    def start_seconds(self) -> float | None:
        """How long it took until it was ready, if that was seen."""
        ...

    def round(self, works: list[Work], rate: float | None, seed: int) -> Round:
        """Generate the outputs that ``works`` asks for: all at once, or as a Poisson process of ``rate`` per second."""
        ...

    def close(self) -> None:
        """End the processes that were started."""
        ...


def cpu_seconds_of_tree(pid: int) -> float:
    """User and system seconds of a process and all below it."""
    root = psutil.Process(pid)
    times = [process.cpu_times() for process in (root, *root.children(recursive=True))]
    return float(sum(t.user + t.system for t in times))


class Server:
    """A server that is there already, at an OpenAI-compatible URL. ``pid``: whose CPU seconds are counted, if given."""

    start_seconds: float | None = None

    def __init__(self, url: str, pid: int | None = None, model: str | None = None) -> None:
        self.url, self._pid, self._model = url, pid, model
        asyncio.run(drive(url, _WARM_UP, None, 0, model))

    def round(self, works: list[Work], rate: float | None, seed: int) -> Round:
        cpu = cpu_seconds_of_tree(self._pid) if self._pid else 0.0
        began = time.perf_counter()
        timings = asyncio.run(drive(self.url, works, rate, seed, self._model))
        seconds = time.perf_counter() - began
        assert sum(t.tokens for t in timings) == sum(w.output for w in works)
        return Round(
            seconds,
            cpu_seconds_of_tree(self._pid) - cpu if self._pid else None,
            [t.first_token for t in timings],
            [gap for t in timings for gap in t.gaps],
        )

    def close(self) -> None:
        """Leave it running."""


class Pagewise(Server):
    """``pagewise serve`` on a free port. ``options``: more of its options."""

    def __init__(self, model_path: str, device: str, dtype: str, *options: str) -> None:
        began = time.perf_counter()
        options = ("--device", device, "--dtype", dtype, "--log-level", "warning", *options)
        self._server = Served(model_path, *options, ready_seconds=3600)
        self.start_seconds = time.perf_counter() - began
        self.process = self._server.process
        super().__init__(self._server.url, self.process.pid)

    def close(self) -> None:
        self._server.close()


class Child:
    """A process that generates without HTTP.

    It speaks JSON lines: after a line by which it is ready, it gets a list of requests in each line, and answers
    with ``seconds`` and ``cpu_seconds``.
    """

    start_seconds: float | None

    def __init__(self, command: list[str]) -> None:
        began = time.perf_counter()
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        pipe = subprocess.PIPE
        self._process: subprocess.Popen[str] = spawn(command, stdin=pipe, stdout=pipe, stderr=self._errors, text=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout
        self._answer('"ready"')
        self.start_seconds = time.perf_counter() - began
        self.round(_WARM_UP, None, 0)

    def _answer(self, start: str) -> str:
        for line in self._answers:
            if line.startswith(start):
                return line
        self._errors.seek(0)
        raise RuntimeError(f"{self._process.args!r} ended early:\n{self._errors.read()[-2000:]}")

    def round(self, works: list[Work], rate: float | None, seed: int) -> Round:
        self._requests.write(json.dumps([asdict(work) for work in works]) + "\n")
        self._requests.flush()
        taken = json.loads(self._answer("{"))
        return Round(taken["seconds"], taken["cpu_seconds"])

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._errors.close()


def _transformers(method: str, model_path: str, device: str, dtype: str) -> Contender:
    script = str(_FOLDER / "peers" / "transformers_engine.py")
    return Child([sys.executable, script, method, model_path, device, dtype])


def _openvino_genai(cache: str, weights: str, model_path: str, device: str, dtype: str) -> Contender:
    if (device, dtype) != ("cpu", "float32"):
        raise ValueError("OpenVINO GenAI is compared on the CPU in float32")
    python = environments.python(_FOLDER / "peers" / "openvino-genai.txt", torch=True)
    exported = environments.openvino_model(python, Path(model_path), weights)
    script = str(_FOLDER / "peers" / "openvino_genai_engine.py")
    return Child([str(python), script, str(exported), cache, "float32" if weights == "fp32" else "default"])


def _llama_cpp(kind: str, model_path: str, device: str, dtype: str) -> Contender:
    if device != "cpu":
        raise ValueError("llama.cpp is compared on the CPU")
    python = environments.python(_FOLDER / "peers" / "llama-cpp.txt")
    file = environments.gguf_model(python, Path(model_path), kind)
    return Child([str(python), str(_FOLDER / "peers" / "llama_cpp_engine.py"), str(file), str(_SEQUENCES)])


ENGINES: dict[str, Callable[[str, str, str], Contender]] = {
    "generate": lambda *model: _transformers("generate", *model),
    "generate_batch": lambda *model: _transformers("generate_batch", *model),
    "openvino-genai": lambda *model: _openvino_genai("no-prefix-cache", "fp32", *model),
    "openvino-genai-prefix-cache": lambda *model: _openvino_genai("prefix-cache", "fp32", *model),
    "openvino-genai-int4": lambda *model: _openvino_genai("no-prefix-cache", "int4", *model),
    "llama-cpp-q4_0": lambda *model: _llama_cpp("Q4_0", *model),
    "llama-cpp-q4_k_m": lambda *model: _llama_cpp("Q4_K_M", *model),
}


def contender(name: str, model_path: str, device: str, dtype: str, url_model: str | None = None) -> Contender:
    """Start one: ``pagewise``, ``pagewise:OPTIONS`` with more options between spaces, a name of ``ENGINES``, or a URL,
    with ``#PID`` behind it to count the CPU seconds of that process and its children.

    Raises:
        ValueError: there is no such contender.
    """
    if name.startswith(("http://", "https://")):
        address = urlsplit(name)
        pid = int(address.fragment) if address.fragment else None
        return Server(name.partition("#")[0].rstrip("/"), pid, url_model)
    kind, _, options = name.partition(":")
    if kind == "pagewise":
        return Pagewise(model_path, device, dtype, *options.split())
    if name not in ENGINES:
        raise ValueError(f"there is no contender {name!r}: there are pagewise, {', '.join(ENGINES)}, and URLs")
    return ENGINES[name](model_path, device, dtype)
