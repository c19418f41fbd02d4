"""Every module can be imported, and the names that the product takes from other packages are there, in the versions
installed.

These tests run with the versions of constraints.txt, and by ``make test-lowest``, ``test-newest`` and
``test-cuda-build`` with others: torch's CPU build lacks names that its CUDA build has, and the other way round.
"""

import importlib
import importlib.util
import re
from pathlib import Path

import pytest

from tests.versions.names import exists, taken_names

ROOT = Path(__file__).parents[2]
OURS = (
    "pagewise_shared",
    "pagewise_kernels",
    "pagewise_scheduler",
    "pagewise_executor",
    "pagewise_gateway",
    "pagewise",
)
ROOMS = ("shared", "kernels", "services")
PACKAGES = ("torch", "triton", "cuda", "transformers", "tokenizers", "safetensors", "huggingface_hub", "aiohttp", "zmq")
OPTIONAL = {"cuda": "cuda.bindings"}
"""Packages that may be missing, and the module that shows it. PyPI's CUDA build of torch brings bindings of CUDA."""

EXTRAS = {"ray"}
"""Packages that few installations have."""


def sources() -> list[Path]:
    return [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]


def is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def test_every_module_can_be_imported() -> None:
    failed = {}
    for path in sources():
        # The folders above the packages are no packages.
        parts = path.relative_to(ROOT).with_suffix("").parts
        module = ".".join(parts[next(index for index, part in enumerate(parts) if part.startswith("pagewise")) :])
        if path.stem == "__main__":
            continue
        try:
            importlib.import_module(module.removesuffix(".__init__"))
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] not in EXTRAS:
                failed[module] = repr(error)
        except Exception as error:
            failed[module] = repr(error)
    assert not failed


@pytest.mark.parametrize("package", PACKAGES)
def test_the_names_that_the_product_takes_from_a_package_exist(package: str) -> None:
    if not is_there(OPTIONAL.get(package, package)):
        pytest.skip(f"{package} is not installed")
    missing = {
        f"{path.relative_to(ROOT)}:{name.line}": name.dotted
        for path in sources()
        for name in taken_names(path, (package,))
        if not exists(name.dotted)
    }
    assert not missing


def test_the_functions_of_the_driver_exist() -> None:
    """They are called by their names, of a module that is passed on as a value."""
    if not is_there("cuda.bindings"):
        pytest.skip("the bindings of CUDA are not installed")
    text = (ROOT / "services/executor/pagewise_executor/kv/cuda_memory.py").read_text()
    names = set(re.findall(r"\bcu[A-Z]\w+", text))
    assert "cuMemMap" in names
    from cuda.bindings import driver

    assert [name for name in names if not hasattr(driver, name)] == []


def test_a_name_that_is_missing_is_found(tmp_path: Path) -> None:
    """As ``torch._C._cuda_getDriverVersion`` was, which kept every executor with a GPU from starting."""
    source = tmp_path / "source.py"
    source.write_text(
        "import torch\nimport os.path as path\nfrom torch import nn, nothing\nimport torch.cuda as cuda\n"
        "def f(x):\n"
        "    return torch.cuda.Stream(x), cuda.no_stream(), nn.Linear.weight_of, torch._C._cuda_no_version()\n"
    )
    missing = [(name.dotted, name.line) for name in taken_names(source, ("torch",)) if not exists(name.dotted)]
    assert sorted(missing) == [
        ("torch._C._cuda_no_version", 6),
        ("torch.cuda.no_stream", 6),
        ("torch.nn.Linear.weight_of", 6),
        ("torch.nothing", 3),
    ]
