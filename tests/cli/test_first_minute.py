"""Common mistakes when a model is served for the first time: one sentence each, with a remedy."""

import ctypes
import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from pagewise.ports import holder_of, next_free
from pagewise_executor import devices
from pagewise_executor.models import weight_memory
from pagewise_executor.models.weight_memory import check_weights
from pagewise_shared import model_files
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.errors import ModelError
from pagewise_shared.model_files import resolve_model

SHA = "0" * 40


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as a client asks for before it downloads anything."""

    def do_GET(self) -> None:
        if "gated/model/revision" in self.path:
            self._answer(200, {"id": "gated/model", "sha": SHA, "siblings": []})
        elif "gated/model" in self.path:
            self._answer(403, {}, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"})
        elif "open/large" in self.path and "/tree/" in self.path:
            size = 1 << 60
            lfs = {"oid": "1" * 64, "size": size, "pointerSize": 130}
            self._answer(200, [{"type": "file", "path": "model.safetensors", "size": size, "oid": SHA, "lfs": lfs}])
        elif "open/large/resolve" in self.path:
            self._answer(200, {}, {"X-Repo-Commit": SHA, "ETag": '"1"', "X-Linked-Size": str(1 << 60)})
        elif "open/large" in self.path:
            self._answer(200, {"id": "open/large", "sha": SHA, "siblings": []})
        else:
            self._answer(404, {}, {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET  # noqa: N815 - the base class's name

    def _answer(self, status: int, body: object, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        for name, value in ({"Content-Type": "application/json"} | (headers or {})).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def serve(*arguments: str, code: int = 1, **environ: str) -> str:
    """Run ``pagewise serve`` until it gives up; return the last line that it has printed."""
    command = [sys.executable, "-m", "pagewise.main", "serve", *arguments, f"--port={free_port()}"]
    if any(argument.startswith("--port") for argument in arguments):
        command.pop()
    known = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PAGEWISE_"))}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=known | environ)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert not done.stdout
    return done.stderr.splitlines()[-1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model, in a folder of its own."""
    path = tmp_path_factory.mktemp("models") / "model"
    shutil.copytree(resolve_model("pagewise-demo"), path)
    return path


@pytest.fixture
def model(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "model"))


def test_no_such_model(model: Path) -> None:
    said = serve(f"{model}s")
    assert f"no such model: {model}s is neither a directory nor a hub id" in said
    assert f"did you mean {model}?" in said
    assert "is a file" in serve(str(model / "config.json"))
    assert f"did you mean {model}?" in serve(str(model.parent))
    (model / "config.json").unlink()
    (model / "weights.gguf").touch()
    (model / "more.gguf").touch()
    assert "has several GGUF models, give one: more.gguf, weights.gguf" in serve(str(model))
    assert "weights.gguf is no GGUF file: it does not begin with GGUF" in serve(str(model / "weights.gguf"))


@pytest.mark.parametrize(
    ("asked", "environ", "expected"),
    [
        (
            ["no/model"],
            {},
            "the hub has no model no/model: look for its name at https://huggingface.co/models?search=model",
        ),
        (["no/model"], {}, "if it is private, run `hf auth login`, or set HF_TOKEN"),
        (["gated/model"], {}, "gated: ask for access at https://huggingface.co/gated/model, then run `hf auth login`"),
        (["gated/model"], {"HF_TOKEN": "hf_x"}, "your token has no access to it: ask for it at"),
        (["open/large"], {}, "the disk is too full for open/large: 1073741824GiB are to be downloaded to"),
        (["no/model"], {"HF_HUB_OFFLINE": "1"}, "(HF_HUB_OFFLINE is set): unset it, or run `hf download no/model`"),
        (["no/model"], {"HF_ENDPOINT": "http://127.0.0.1:1"}, "(Connection refused): run `hf download no/model` where"),
        (["no/mo del"], {}, "no such model: no/mo del is neither a directory nor a hub id"),
    ],
)
def test_what_the_hub_refuses(
    hub: str, tmp_path: Path, asked: list[str], environ: dict[str, str], expected: str
) -> None:
    said = serve(*asked, **{"HF_HOME": str(tmp_path), "HF_ENDPOINT": hub} | environ)
    assert expected in said.replace("[Errno 111] ", "")


def test_a_port_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"(pid {os.getpid()})" in holder_of(port)
        free = next_free("127.0.0.1", port)
        assert free is not None
        assert port < free
        said = serve(f"--port={port}")
        assert f"cannot serve HTTP on 127.0.0.1 port {port}: Address already in use, by " in said
        assert f"(pid {os.getpid()}); take another one: --port " in said
    assert holder_of(port) == ""
    assert "--host takes an address of this machine" in serve("--host=192.0.2.1")


def test_packages_that_are_missing(tmp_path: Path) -> None:
    """Hidden by a finder that knows nothing of them, as where they are not installed."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.machinery as m\nfind = m.PathFinder.find_spec\n"
        "m.PathFinder.find_spec = classmethod(lambda c, name, *r: None if name in ('torch',) else find(name, *r))"
    )
    said = serve(PYTHONPATH=str(tmp_path))
    assert said.endswith("the executor needs packages that are not installed (torch): pip install 'pagewise[executor]'")
    (tmp_path / "sitecustomize.py").write_text(
        (tmp_path / "sitecustomize.py").read_text().replace("'torch'", "'aiohttp'")
    )
    said = serve("--simulate", PYTHONPATH=str(tmp_path))
    assert said.endswith("the gateway needs packages that are not installed (aiohttp): pip install 'pagewise[gateway]'")


def test_models_that_are_not_served(model: Path) -> None:
    config = model / "config.json"
    whole = config.read_text()
    config.write_text(json.dumps(json.loads(whole) | {"model_type": "hyena"}))
    said = serve(str(model))
    assert "executor-0 cannot start: " in said
    assert "its config.json has the model_type 'hyena', which is not known here; served are Llama, " in said
    config.write_text(whole)
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    said = serve(str(model))
    assert "only safetensors are loaded" in said
    assert "convert them: python -c" in said


def test_a_gpu_that_is_asked_for_and_not_there() -> None:
    if torch.cuda.is_available():
        pytest.skip("it is there")
    assert "--device cuda: torch sees no CUDA device here: --device cpu computes without one" in serve("--device=cuda")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--kv-memory=9999GiB", "--device=cpu"], "--kv-memory asks for 9999GiB, and "),
        (["--host-memory=4000GiB", "--executors=2"], "--host-memory asks for 8000GiB for 2 executors, and "),
        (["--keys=/no/keys"], "--keys /no/keys: there is no key of 'scheduler': no file /no/keys/scheduler/"),
        (["--ssl-certfile=/no/cert"], "--ssl-certfile /no/cert: No such file or directory"),
        (["--api-keys-file=/no/keys"], "--api-keys-file /no/keys: No such file or directory"),
        (
            ["--num-blocks=3"],
            "the KV pool is too small: it would hold 48 tokens (3 blocks). One sequence of 256 tokens",
        ),
        (["--max-model-len=1000000"], "--max-model-len 1000000 is over the model's own limit of "),
        (["--store=redis://127.0.0.1:1"], "--store: Error 111 connecting to 127.0.0.1:1"),
        (["--disk-cache=/proc/no/folder"], "--disk-cache /proc/no/folder: No such file or directory"),
        (
            ["--enable-lora", "--lora-modules", "a=/no/folder"],
            "--lora-modules a=/no/folder: there is no such folder",
        ),
    ],
)
def test_options_that_name_nothing_or_too_much_are_refused_before_a_process_starts(
    options: list[str], expected: str
) -> None:
    command = [sys.executable, "-m", "pagewise.main", "serve", *options, f"--port={free_port()}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert expected in line
    if "memory" in options[0]:
        assert line.endswith(f"of memory are free: lower {options[0].partition('=')[0]}")


def test_a_pool_that_is_too_small() -> None:
    said = serve("--kv-memory=200KiB", "--device=cpu")
    assert "the KV pool is too small: it would hold 48 tokens" in said
    assert "raise --kv-memory or --num-blocks" in said


@pytest.fixture
def nvidia(tmp_path: Path) -> Path:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\nGCC version: 12\n"
    )
    return tmp_path


def test_why_torch_uses_no_gpu(nvidia: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    said = devices.why_no_gpu(nvidia, None)
    assert "is built for the CPU alone: pip install" in said
    assert "driver 550.54.15 is too old for CUDA 13.0" in devices.why_no_gpu(nvidia, "13.0")
    monkeypatch.setattr(torch.cuda, "init", lambda: (_ for _ in ()).throw(RuntimeError("no\nroom")))
    assert devices.why_no_gpu(nvidia, "12.6").endswith("though this machine has an NVIDIA GPU: no")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert devices.why_no_gpu(nvidia, None) == ""
    (nvidia / "dev/nvidia0").unlink()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert devices.why_no_gpu(nvidia, None) == ""


class Model(torch.nn.Module):
    """A model without data: an embedding of 1M weights, a layer of 10M, and a norm.

    ``mixture``: the layer has the weights of experts, as transformers keeps them, and no linear layer.
    """

    def __init__(self, *, mixture: bool) -> None:
        super().__init__()
        with torch.device("meta"):
            self.embed_tokens = torch.nn.Embedding(1000, 1000)
            linear = torch.nn.Linear(5000, 2000, bias=False)
            experts = torch.nn.ParameterDict({"up_proj": torch.nn.Parameter(torch.empty(10, 1000, 1000))})
            self.layers = torch.nn.ModuleList([experts if mixture else linear])
            self.norm = torch.nn.LayerNorm(1000, bias=False)


@pytest.mark.parametrize(
    ("free", "options", "expected"),
    [
        (45_000_000, {}, None),
        (
            30_000_000,
            {},
            "in float32 they take 42MiB, and 29MiB are free; --dtype bfloat16 takes 21MiB, or --quantization int8 "
            "takes 14MiB, or --quantization int4 takes 9311KiB",
        ),
        (15_000_000, {}, "; --quantization int8 takes 14MiB, or --quantization int4 takes 9311KiB"),
        (9_000_000, {}, "; take a smaller model, or a machine with more than 9311KiB for it"),
        (15_000_000, {"quantization": "int8"}, None),
        (9_000_000, {"quantization": "int8"}, "in int8 they take 14MiB"),
        (10_000_000, {"quantization": "int4"}, None),
    ],
)
def test_what_would_fit(
    free: int, options: dict[str, Any], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = refused_weights(Model(mixture=False), free, options, monkeypatch)
    assert said is None if expected is None else expected in str(said)


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_experts_are_not_in_eight_bits(quantization: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the option does not make a mixture fit, and nobody is advised to take it."""
    said = refused_weights(Model(mixture=True), 15_000_000, {"quantization": quantization}, monkeypatch)
    assert said is not None
    assert f"in {'float32' if quantization == 'none' else 'int8'} they take 42MiB" in said
    assert "--quantization int8" not in said
    assert refused_weights(Model(mixture=True), 45_000_000, {"quantization": quantization}, monkeypatch) is None


def refused_weights(
    model: torch.nn.Module, free: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> str | None:
    """Why the weights of a model do not fit into so many bytes; None: they do."""
    monkeypatch.setattr(weight_memory, "free_memory", lambda device: free)
    monkeypatch.setattr(weight_memory, "_swap", lambda: 0)
    try:
        check_weights(
            ExecutorConfig(model="m", **options), model, {}, torch.device("cpu"), torch.float32, 1, stored=False
        )
    except ModelError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.ENOSPC, "the disk of .* is full: set HF_HOME to a folder on a disk with room for a/b"),
        (errno.EACCES, "where this user may not write: set HF_HOME"),
    ],
)
def test_a_cache_that_cannot_be_written(number: int, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(ModelError, match=expected):
        model_files.resolve_model("a/b")


@pytest.mark.parametrize(
    ("number", "code", "thread"),
    [(signal.SIGINT, 130, "main"), (signal.SIGINT, 130, "other"), (signal.SIGTERM, -signal.SIGTERM, "main")],
)
def test_signals_end_a_download_and_leave_nothing(
    tmp_path: Path, number: signal.Signals, code: int, thread: str
) -> None:
    """The kernel chooses the thread that gets a process's signal: usually the main one, at times another."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        command = [sys.executable, "-m", "pagewise.main", "serve", "some/model", f"--port={free_port()}"]
        environ = os.environ | {"HF_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}", "HF_HOME": str(tmp_path)}
        environ["TMPDIR"] = str(temporary)
        process = subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True)
        silent.settimeout(60)
        with silent.accept()[0]:
            threads = sorted(int(name) for name in os.listdir(f"/proc/{process.pid}/task"))
            ctypes.CDLL(None).tgkill(process.pid, threads[0 if thread == "main" else -1], number)
            _, said = process.communicate(timeout=30)
        assert process.returncode == code, said
        assert "Traceback" not in said
        assert not list(temporary.glob("pagewise-*"))
