"""Checks that ``pagewise serve`` makes before it starts a process: packages, and the files of a model."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from pagewise_shared.config import ServeConfig
from pagewise_shared.config.adapter_options import SERVE_ADAPTER
from pagewise_shared.errors import ModelError
from pagewise_shared.model_files import local_model

from pagewise.supervisor import StartError

GATEWAY = ("aiohttp", "huggingface_hub", "jinja2", "llguidance", "numpy", "tokenizers", "transformers")
EXECUTOR = ("huggingface_hub", "llguidance", "numpy", "redis", "safetensors", "torch", "transformers", "xxhash")
"""The modules that the services import, as the extras of pyproject.toml install them."""


def check_packages(config: ServeConfig) -> None:
    """Look whether what the services import is installed, without importing it.

    Raises:
        StartError: something is not; the text says how to install it.
    """
    wanted: list[tuple[str, Sequence[str]]] = [("gateway", GATEWAY)]
    if config.executors and not config.executor.simulate:
        wanted = [("gateway", GATEWAY), ("executor", EXECUTOR)]
    for service, modules in wanted:
        if missing := [name for name in modules if find_spec(name) is None]:
            extra = "executor" if len(wanted) > 1 else "gateway"
            raise StartError(
                f"what the {service} needs is not installed ({', '.join(missing)}): pip install 'pagewise[{extra}]'"
            )


def check_folder(model: str) -> None:
    """Look whether a directory can be a model at all. Hub ids are left alone.

    Raises:
        StartError: it cannot; the text says what to do.
    """
    try:
        folder = local_model(model)
    except ModelError as error:
        raise StartError(str(error)) from error
    if folder is None or (folder / "config.json").is_file():
        return
    raise StartError(f"{folder} is no model directory: it has no config.json{_advice(folder)}")


def _advice(folder: Path) -> str:
    for pattern, advice in (
        ("*.gguf", "GGUF files are not served: take the model's repository with safetensors"),
        ("adapter_config.json", "it is an adapter: give the model, and " + SERVE_ADAPTER),
        ("snapshots/*/config.json", "it is an entry of the hub's cache: give {}"),
        ("*/config.json", "did you mean {}?"),
    ):
        if found := next(iter(sorted(folder.glob(pattern))), None):
            return "; " + advice.format(folder if pattern == "adapter_config.json" else found.parent)
    return ""
