"""The options of ``vllm serve`` that are accepted: options with the same meaning, and values that change nothing here.

Every other option is refused like an unknown one: the error names the nearest option. ``docs/vllm-flags.md`` lists the
options that replace refused ones.
"""

import argparse
import difflib
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec

from pagewise_shared.errors import ConfigError

_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT]?)")
_UNITS = {"": 1} | {unit: 1000**power for power, unit in enumerate("kmgt", 1)}
_UNITS |= {unit: 1024**power for power, unit in enumerate("KMGT", 1)}


def _count(text: str) -> int | str:
    """Read a number as vLLM does: 1k is 1,000, and 1K is 1,024; -1 means auto."""
    if text in ("-1", "auto"):
        return "auto"
    match = _COUNT.fullmatch(text.strip())
    if match is None:
        raise ValueError(text)
    return int(float(match[1]) * _UNITS[match[2]])


def _gib(text: str) -> str | None:
    """Read a size in GiB; 0 is none."""
    return f"{int(float(text) * 2**30)}" if float(text) > 0 else None


def _off(given: bool) -> bool:
    """Read a switch that turns ours off."""
    return not given


def _api_keys(given: Any) -> str:
    """Make the value of ``PAGEWISE_API_KEYS`` of one key or several, of which the first is an operator's."""
    keys = [given] if isinstance(given, str) else list(given)
    if not all(re.fullmatch(r"[!\"$-+\--9;-~]+", key) for key in keys):
        raise ConfigError("--api-key: a key has a space, a comma, a colon or a # in it, or a character beyond ASCII")
    first, *others = (f"default: {key}" for key in keys)
    return ", ".join([f"{first} operator=yes", *others])


_DTYPES = {"half": "float16", "float": "float32"}

ALIASES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "--max-model-len": ("max_model_len", _count),
    "--max-num-batched-tokens": ("max_num_batched_tokens", _count),
    "--dtype": ("dtype", lambda text: _DTYPES.get(text, text)),
    "--log-level": ("log_level", str.lower),
    "-tp": ("tensor_parallel", str),
    "--tensor-parallel-size": ("tensor_parallel", str),
    "-sc": ("speculative_config", str),
    "-q": ("quantization", str),
    "-asc": ("gateways", str),
    "--api-server-count": ("gateways", str),
    "--device-memory-utilization": ("gpu_memory_utilization", str),
    "--kv-cache-memory-bytes": ("kv_memory", lambda text: f"{int(_count(text))}"),
    "--num-gpu-blocks-override": ("num_blocks", str),
    "--kv-cache-dtype": (
        "kv_dtype",
        {"auto": "auto", "fp8": "fp8", "fp8_e4m3": "fp8", "int8_per_token_head": "int8"}.__getitem__,  # nosec B105 # no secret
    ),
    "--kv-offloading-size": ("host_memory", _gib),
    "--api-key": ("api_keys", _api_keys),
    "--enforce-eager": ("cuda_graphs", _off),
    "--enable-log-requests": ("log_requests", bool),
    "--disable-log-requests": ("log_requests", _off),
}
"""The option that each sets, and the function that reads its value, also in vLLM's spelling."""

_ALWAYS = (
    "--enable-prefix-caching --enable-chunked-prefill --async-scheduling --enable-prompt-tokens-details "
    "--enable-request-id-headers --enable-ssl-refresh --language-model-only --use-tqdm-on-load "
    "--disable-custom-all-reduce --disable-log-stats --disable-uvicorn-access-log --disable-chunked-mm-input "
    "--disable-cascade-attn --use-v2-block-manager --aggregate-engine-logging --enable-log-deltas"
)
ALWAYS = frozenset(_ALWAYS.split())
"""Switches for behaviour that cannot be turned off here. Their ``--no-`` forms are refused."""

ONLY = {
    "--scheduling-policy": ("fcfs", "priority"),
    "--runner": ("auto", "generate"),
    "--task": ("auto", "generate"),
    "--convert": ("auto", "none"),
    "--model-impl": ("auto", "transformers"),
    "--load-format": ("auto", "safetensors", "gguf"),
    "--config-format": ("auto", "hf"),
    "--tokenizer-mode": ("auto", "hf", "fast"),
    "--distributed-executor-backend": ("mp", "uni"),
    "--max-logprobs": ("20",),
    "--logprobs-mode": ("raw_logprobs",),
    "--lora-dtype": ("auto",),
    "--cpu-offload-gb": ("0",),
    "--swap-space": ("0",),
    "--pipeline-parallel-size": ("1",),
    "-pp": ("1",),
    "--data-parallel-size": ("1",),
    "-dp": ("1",),
    "--decode-context-parallel-size": ("1",),
    "-dcp": ("1",),
    "--prefill-context-parallel-size": ("1",),
    "-pcp": ("1",),
    "--stream-interval": ("1",),
    "--watermark": ("0", "0.0"),
    "--kv-offloading-backend": ("native",),
    "--chat-template-content-format": ("auto",),
    "--response-role": ("assistant",),
    "--nnodes": ("1",),
    "-n": ("1",),
    "--prefix-caching-hash-algo": ("sha256", "sha256_cbor"),
}
"""The values of options that describe the behaviour here; other values are refused."""

NAMES = (*ALIASES, *ALWAYS, *ONLY)


def _is_switch(name: str) -> bool:
    return name in ALWAYS or (name in ALIASES and ALIASES[name][1] in (bool, _off))


def values(name: str, given: Any) -> dict[str, Any]:
    """Return the options that an option of vLLM sets, by name.

    ``given``: a text, texts, or whether a switch is on.

    Raises:
        ConfigError: the value cannot be used.
    """
    if name in ALIASES:
        option, read = ALIASES[name]
        try:
            return {option: read(given)}
        except (ValueError, KeyError):
            raise ConfigError(f"{name}: {given!r} cannot be used") from None
    accepted = ONLY.get(name, (True,))
    if given not in accepted:
        known = f"only {' and '.join(map(str, accepted))} can be given" if name in ONLY else "it is always on"
        raise ConfigError(f"{name}: {known} (got {given!r}); docs/vllm-flags.md says more")
    return {}


def reader(name: str) -> Callable[[str], Any]:
    """Return the function that reads a value of our option ``name``, also in vLLM's spelling.

    A value that it cannot read stays a text, about which the option itself complains.
    """

    def read(text: str) -> Any:
        try:
            return ALIASES[name][1](text)
        except (ValueError, KeyError):
            return text

    return read


def add_flags(parser: argparse.ArgumentParser, known: Collection[str], options: Collection[str]) -> None:
    """Let a parser accept these options of vLLM.

    ``known``: names that it accepts already. ``options``: our options that the command has.
    """
    for name in NAMES:
        if name in known or (name in ALIASES and ALIASES[name][0] not in options):
            continue
        hidden: dict[str, Any] = {"action": _Set, "dest": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        if _is_switch(name):
            parser.add_argument(name, f"--no-{name[2:]}", nargs=0, **hidden)
        else:
            parser.add_argument(name, nargs="+" if name == "--api-key" else None, **hidden)


class _Set(argparse.Action):
    """Sets the options that an option of vLLM means here."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, given: Any, name: str | None = None
    ) -> None:
        flag = self.option_strings[0]
        try:
            found = values(flag, name == flag if self.nargs == 0 else given)
        except ConfigError as error:
            parser.error(str(error))
        for option, value in found.items():
            setattr(namespace, option, value)


def unknown(arguments: Sequence[str], known: Collection[str]) -> str:
    """Return the error for arguments that a command does not have. ``known``: names of its options."""
    name = next((each.partition("=")[0] for each in arguments if each.startswith("-")), None)
    if name is None:
        return f"unrecognized arguments: {' '.join(arguments)}"
    near = difflib.get_close_matches(name, [*known, *NAMES], n=1)
    return f"there is no option {name}" + (f": did you mean {near[0]}?" if near else "")


def options_from(given: dict[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return keyword arguments, with vLLM's options replaced by ours.

    Unknown names stay. ``known``: the names of our options.

    Raises:
        ConfigError: a value of an option of vLLM is refused.
    """
    found: dict[str, Any] = {}
    for name, value in given.items():
        flag = f"--{name.replace('_', '-')}"
        if name in known:
            if isinstance(value, dict):  # vLLM's class takes options in JSON as objects
                value = msgspec.json.encode(value).decode()
            found[name] = reader(flag)(value) if isinstance(value, str) else value
        elif flag in NAMES:
            found |= values(flag, value if isinstance(value, bool | list) else str(value))
        else:
            found[name] = value
    return found
