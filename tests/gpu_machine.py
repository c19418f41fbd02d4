"""A plugin of pytest that makes this machine look like one with a GPU where nothing of Pagewise was installed.

    python -m pytest --collect-only -m gpu -p tests.gpu_machine tests/kernels tests/executor

It shows that the GPU tests can be collected there; none of them can run here. A GPU is often lent for minutes, without
a network, with PyTorch and transformers on it.
"""

import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

import torch

from benchmarks.gpu_smoke.plan import CARRIED

THERE = {
    "accelerate", "aiohttp", "httpx", "huggingface-hub", "hypothesis", "jinja2", "matplotlib", "numpy",
    "packaging", "peft", "prometheus-client", "psutil", "pytest", "pytest-timeout", "pytest-xdist", "safetensors",
    "tokenizers", "torch", "tqdm", "transformers", "triton", "uvloop", "xxhash",
}  # fmt: skip
"""Such a machine's packages among the ones that ``make setup`` installs by name."""


def _wanted() -> Iterator[str]:
    """The distributions that pyproject.toml names."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    for requirements in (project["dependencies"], *project["optional-dependencies"].values()):
        for requirement in requirements:
            name = re.match(r"[\w.-]+", requirement)
            assert name is not None
            yield _normal(name[0])


def _normal(name: str) -> str:
    return name.lower().replace("_", "-")


_missing = set(_wanted()) - THERE - CARRIED.keys()
HIDDEN = {
    module
    for module, distributions in importlib.metadata.packages_distributions().items()
    if all(_normal(name) in _missing for name in distributions)
}
"""The modules of the others."""


class _Finder(PathFinder):
    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return None if fullname.partition(".")[0] in HIDDEN else super().find_spec(fullname, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = _Finder
torch.cuda.is_available = lambda: True
