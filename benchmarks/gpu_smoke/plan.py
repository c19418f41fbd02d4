"""What the first hour on a GPU runs, in parts that fit into calls of at most eight minutes.

Only the standard library is imported here: the plan can be read where nothing is installed.
"""

import re
from typing import NamedTuple

CALL_SECONDS = 480
"""What one call may take, with all its steps."""
_START_SECONDS = 15
"""What a call takes beside its steps: it looks at the device, and installs wheels."""

CARRIED = {"msgspec": "msgspec", "pyzmq": "zmq", "pytest-asyncio": "pytest_asyncio"}
"""What has to be brought along as wheels: distributions, and the modules in them."""

ROOMS = (".", "shared", "kernels", "services/scheduler", "services/executor", "services/gateway", "services/cli")
"""Where the packages are in a repository in which nothing has been installed."""


class Step(NamedTuple):
    """One process, ``python -m`` with these arguments, which writes its rows to a file of its own as it goes.

    ``seconds``: after which it is ended. ``record``: the option that names the file.
    """

    name: str
    seconds: int
    arguments: tuple[str, ...]
    record: str = "--json"


def _tests(folder: str, processes: int, seconds: int) -> Step:
    options = ("-m", "gpu", "-n", str(processes), "-q", "-p", "no:cacheprovider", "--timeout", "300")
    # The first run should not fail because some release warns of what the next one will remove.
    more = ("-o", "filterwarnings=default", "-p", "benchmarks.gpu_smoke.outcomes")
    return Step(f"tests-{folder}", seconds, ("pytest", *options, *more, f"tests/{folder}"), "--outcomes")


def _kernels(only: str, seconds: int) -> Step:
    return Step(f"kernels-{only}", seconds, ("benchmarks.kernels.run", "--only", only))


def _engine(model: str, seconds: int, *more: str) -> Step:
    return Step(f"engine-{model}", seconds, ("benchmarks.engine.run", "--alone", "--models", model, *more))


PARTS: dict[int, tuple[Step, ...]] = {
    1: (_tests("kernels", 8, 260), _kernels("decode", 200)),
    2: (_tests("executor", 6, 270), _engine("qwen3-0.6b", 190, "--also-apart")),
    3: (_engine("llama-3-8b", 460),),
    4: (_kernels("prefill", 150), _kernels("sampling", 130), _kernels("elementwise", 130), _kernels("layer", 50)),
    5: (_kernels("linear", 130), _kernels("sweep", 140), _kernels("shared", 120), _kernels("inputs", 60)),
}
"""The steps of each part. Those that are most likely to fail, and cost the least to mend, come first."""

assert all(_START_SECONDS + sum(step.seconds for step in steps) <= CALL_SECONDS for steps in PARTS.values())


def device_label(name: str) -> str:
    """Return what files say of a device: "H200" for "NVIDIA H200", "H100" for "NVIDIA H100 80GB HBM3"."""
    words = [word for word in re.split(r"[\s/]+", name) if word not in ("NVIDIA", "Tesla", "GeForce", "")]
    size = next((number for number, word in enumerate(words) if re.fullmatch(r"\d+GB", word)), len(words))
    return re.sub(r"[^\w.-]", "", "-".join(words[:size])) or "GPU"
