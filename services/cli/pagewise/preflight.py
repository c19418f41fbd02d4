"""Checks that ``pagewise serve`` makes before it starts a process, so that an error comes before any log line."""

import contextlib
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from pagewise_shared.config import ServeConfig, parse_size, size_text
from pagewise_shared.config.adapter_options import SERVE_ADAPTER, adapter_rights
from pagewise_shared.curve import EXECUTOR as EXECUTOR_KEY
from pagewise_shared.curve import GATEWAY as GATEWAY_KEY
from pagewise_shared.curve import SCHEDULER as SCHEDULER_KEY
from pagewise_shared.curve import Keys
from pagewise_shared.errors import ConfigError, ModelError, PagewiseError
from pagewise_shared.generation_config import folder_error
from pagewise_shared.gguf_model import gguf_files
from pagewise_shared.model_files import local_model
from pagewise_shared.start_checks import check_start

from pagewise.doctor.machine import available_memory
from pagewise.supervisor import StartError

GATEWAY = ("aiohttp", "huggingface_hub", "jinja2", "llguidance", "numpy", "tokenizers", "transformers")
EXECUTOR = ("huggingface_hub", "llguidance", "numpy", "redis", "safetensors", "torch", "transformers", "xxhash")
"""The modules that the services import, as the extras of pyproject.toml install them."""


def check_options(config: ServeConfig, gpus: Sequence[str]) -> None:
    """Check that the packages, files and memory that the options need are there. ``gpus``: the GPUs of this machine.

    Raises:
        StartError: one is missing; the text names the option, and a remedy.
    """
    _check_packages(config)
    _check_model(config.gateway.model)
    _check_files(config)
    if config.executors:
        try:
            check_start(config.executor)
        except PagewiseError as error:
            raise StartError(str(error)) from error
    if config.executors and not config.executor.simulate:
        _check_memory(config, on_cpu=config.executor.device == "cpu" or not gpus)


def _check_packages(config: ServeConfig) -> None:
    needed: list[tuple[str, Sequence[str]]] = [("gateway", GATEWAY)]
    if config.executors and not config.executor.simulate:
        needed.append(("executor", EXECUTOR))
    for service, modules in needed:
        if missing := [name for name in modules if find_spec(name) is None]:
            raise StartError(
                f"the {service} needs packages that are not installed ({', '.join(missing)}): "
                f"pip install 'pagewise[{needed[-1][0]}]'"
            )


def _check_model(model: str) -> None:
    """Check that a folder can be a model at all. The hub is asked later."""
    try:
        folder = local_model(model)
    except ModelError as error:
        raise StartError(str(error)) from error
    if folder is None or gguf_files(Path(model).expanduser()) or (folder / "config.json").is_file():
        return
    for pattern, advice in (
        ("adapter_config.json", "it is an adapter: give the model, and " + SERVE_ADAPTER),
        ("snapshots/*/config.json", "it is an entry of the hub's cache: give {}"),
        ("*/config.json", "did you mean {}?"),
    ):
        if found := next(iter(sorted(folder.glob(pattern))), None):
            raise StartError(f"{folder} is no model directory: it has no config.json; {advice.format(found.parent)}")
    raise StartError(f"{folder} is no model directory: it has no config.json")


def _check_files(config: ServeConfig) -> None:
    gateway, cache = config.gateway, config.executor.disk_cache
    for name in (SCHEDULER_KEY, GATEWAY_KEY, EXECUTOR_KEY) if gateway.keys is not None else ():
        with _naming("--keys", gateway.keys, "; `pagewise keys init` makes a folder of keys"):
            Keys(Path(gateway.keys or ""), name)
    if (problem := folder_error(gateway.generation_config)) is not None:
        raise StartError(f"--generation-config: {problem}")
    for option in ("ssl_certfile", "ssl_keyfile", "api_keys_file"):
        if (file := getattr(gateway, option)) is not None:
            with _naming(f"--{option.replace('_', '-')}", file), open(file, "rb"):
                pass
    if cache is not None and config.executors:
        with _naming("--disk-cache", cache):
            Path(cache).mkdir(parents=True, exist_ok=True)  # as executors do, which make a private folder inside
    for name, path in adapter_rights(gateway).modules.items():
        try:
            local_model(path)
        except ModelError as error:
            raise StartError(
                f"--lora-modules {name}={path}: there is no such folder, and it is not a hub id"
            ) from error


@contextlib.contextmanager
def _naming(option: str, value: object, advice: str = "") -> Iterator[None]:
    """Turn errors about files into one that names the option."""
    try:
        yield
    except (OSError, ConfigError) as error:
        raise StartError(f"{option} {value}: {getattr(error, 'strerror', None) or error}{advice}") from error


def _check_memory(config: ServeConfig, *, on_cpu: bool) -> None:
    executor, free = config.executor, available_memory()
    sizes = {"--host-memory": executor.host_memory and parse_size(executor.host_memory)}
    if on_cpu:
        sizes["--kv-memory"] = executor.kv_memory and executor.tensor_parallel * parse_size(executor.kv_memory)
    for option, size in sizes.items():
        if size and config.executors * size > free:
            each = f" for {config.executors} executors" if config.executors > 1 else ""
            raise StartError(
                f"{option} asks for {size_text(config.executors * size)}{each}, and {size_text(free)} of memory are "
                f"free: lower {option}"
            )
