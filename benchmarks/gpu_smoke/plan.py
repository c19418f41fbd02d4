"""The steps of the first hour on a GPU, in parts that fit into calls of at most four minutes, the most telling first.

Only the standard library is imported here: the plan can be read where nothing is installed.
"""

import re
from typing import NamedTuple

CALL_SECONDS = 240
"""Seconds that one call may take, with all its steps."""
_START_SECONDS = 15
"""Seconds that a call takes beside its steps: it looks at the device, and installs wheels."""

CARRIED = {"msgspec": "msgspec", "pyzmq": "zmq", "pytest-asyncio": "pytest_asyncio"}
"""Distributions that have to be brought along as wheels, and the modules in them."""

ROOMS = (".", "shared", "kernels", "services/scheduler", "services/executor", "services/gateway", "services/cli")
"""Where the packages are in a repository in which nothing has been installed."""


class Step(NamedTuple):
    """One process, ``python -m`` with these arguments, which writes each row at once to a file of its own.

    ``seconds``: after which it is ended. ``record``: the option that names the file. ``needs``: modules without which
    it is left out. ``waits``: it begins when the memory of the device is free again, because its processes size their
    pools by the free memory; the wait is part of its seconds.
    """

    name: str
    seconds: int
    arguments: tuple[str, ...]
    record: str = "--json"
    needs: tuple[str, ...] = ()
    waits: bool = False


def _tests(seconds: int) -> Step:
    options = ("-m", "gpu", "-n", "auto", "--maxprocesses", "14", "-q", "-p", "no:cacheprovider", "--timeout", "90")
    # The first run should not fail because some release warns of features that the next one will remove.
    more = ("-o", "filterwarnings=default", "-p", "benchmarks.gpu_smoke.outcomes")
    return Step("tests", seconds, ("pytest", *options, *more, "tests/kernels", "tests/executor"), "--outcomes")


def _kernels(only: str, seconds: int) -> Step:
    return Step(f"kernels-{only}", seconds, ("benchmarks.kernels.run", "--only", only))


def _engine(model: str, seconds: int, *more: str) -> Step:
    return Step(f"engine-{model}", seconds, ("benchmarks.engine.run", "--alone", "--models", model, *more), waits=True)


_DECODES = ("decode 1", "decode 64")
_RATES = (*_DECODES, "decode 256", "prefill 4096", "prefill 32768")
_SERVED = ("--device", "cuda", "--dtype", "bfloat16", "--shape", "qwen3-0.6b", "--workloads", "long")

PARTS: dict[int, tuple[Step, ...]] = {
    1: (_tests(150), Step("recovery", 60, ("benchmarks.recovery.device",), waits=True)),
    2: (
        _engine("llama-3-8b", 130, "--also-fp8", "--works", *_RATES),
        Step(
            "served",
            60,
            ("benchmarks.serving.run", *_SERVED, "--requests", "256", "--contenders", "pagewise", "--rounds", "1"),
            needs=("aiohttp", "psutil", "tokenizers", "llguidance", "jinja2"),
            waits=True,
        ),
    ),
    3: (
        _kernels("decode", 60),
        _kernels("prefill", 75),
        _engine("qwen3-30b-a3b-6-layers", 45, "--works", *_DECODES),
        _kernels("experts", 40),
    ),
    4: (_engine("qwen3-0.6b", 90, "--also-apart"), _kernels("layer", 55), _kernels("linear", 60)),
    5: (
        _kernels("shared", 45),
        _kernels("sweep", 45),
        _kernels("recurrent", 45),
        _kernels("inputs", 30),
        _kernels("elementwise", 30),
        _kernels("sampling", 30),
    ),
}
"""The steps of each part, the most telling first: tests, whole models, then single kernels."""

assert all(_START_SECONDS + sum(step.seconds for step in steps) <= CALL_SECONDS for steps in PARTS.values())


def device_label(name: str) -> str:
    """Return the name of a device in file names: "H200" for "NVIDIA H200", "H100" for "NVIDIA H100 80GB HBM3"."""
    words = [word for word in re.split(r"[\s/]+", name) if word not in ("NVIDIA", "Tesla", "GeForce", "")]
    size = next((number for number, word in enumerate(words) if re.fullmatch(r"\d+GB", word)), len(words))
    return re.sub(r"[^\w.-]", "", "-".join(words[:size])) or "GPU"
