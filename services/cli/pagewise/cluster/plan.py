"""The plan of a deployment: the processes of each kind, their arguments, keys and resources. No Ray here."""

import contextlib
import hashlib
import io
import json
import re
import secrets
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace
from pagewise_shared.config import DEFAULT_NUM_SEQS, ExecutorConfig, UpConfig, secret_variables, to_argv
from pagewise_shared.errors import ModelError
from pagewise_shared.model_files import resolve_model
from pagewise_shared.version import package_version

from pagewise.client import CommandError
from pagewise.cluster.reconcile import Kind
from pagewise.cluster.scaling import Policy
from pagewise.keys import keys as make_keys

NAMESPACE = "pagewise."
"""The prefix of our namespaces in Ray; the name of the deployment follows."""
CONTROLLER = "controller"
"""Name of the actor that starts and stops all others."""

_MODULES: dict[Kind, str] = {kind: f"pagewise_{kind}.main" for kind in ("scheduler", "gateway", "executor")}
_GRACE_SECONDS = 10.0
_SOLE_KEY = r"[^\s,:#]+"
"""An API key without a name."""


class PlanError(CommandError):
    """The options cannot run in a cluster."""


def in_short(error: Exception) -> str:
    """Return the first line of an error's text, and the last exception in it, which Ray puts below its own words."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    raised = [line for line in lines[1:] if re.match(r"[\w.]*(Error|Exception): ", line)]
    return " ... ".join([lines[0].strip(), *raised[-1:]])


_ALWAYS = ("model", "revision", "quantization", "simulate")
_WHERE_QUANTISED = ("device", "kernels", "tensor_parallel")
"""Options that change how inputs of quantised layers are rounded (``docs/quantization.md``)."""
_LENGTH_DEPENDENT = ("dynamic",)
"""Types of RoPE whose frequencies depend on ``--max-model-len``."""


class Served(Struct, frozen=True, kw_only=True):
    """The options of executors that decide which tokens they compute.

    Every field has a default, because another version may have written it.
    """

    model: str = ""
    revision: str | None = None
    quantization: str = "none"
    simulate: bool = False
    max_model_len: int | str | None = None
    device: str = "auto"
    kernels: str = "auto"
    tensor_parallel: int = 1

    @classmethod
    def by(cls, config: ExecutorConfig) -> "Served":
        """Return the options of ``config`` that decide about tokens."""
        return cls(**{name: getattr(config, name) for name in cls.__struct_fields__})


class ProcessPlan(Struct, frozen=True, kw_only=True):
    """How the processes of one kind are started.

    Fields:
        argv: arguments, except arguments that depend on the node: addresses, names, and the folder of keys.
        variables: secret environment variables. keys: content of the files of a folder of keys, by path.
        metrics_key: an API key for reading a gateway's metrics; empty if there are no API keys.
        served: the options of an executor that decide about tokens.
        cpus, gpus: of each rank. ranks: number of ranks of an executor.
        drain_seconds, end_seconds: time for a graceful stop, and for an immediate one.
        version: of the Pagewise that made the plan.
        digest: of all other fields.
    """

    kind: Kind
    argv: list[str]
    variables: dict[str, str]
    keys: dict[str, bytes]
    metrics_key: str = ""
    served: Served | None = None
    cpus: int
    gpus: int = 0
    ranks: int = 1
    drain_seconds: float
    end_seconds: float = _GRACE_SECONDS
    version: str = ""
    digest: str = ""

    @property
    def module(self) -> str:
        """The module that is run."""
        return _MODULES[self.kind]


class Plan(Struct, frozen=True, kw_only=True):
    """A deployment."""

    name: str
    gateways: int
    executors: int
    policy: Policy
    processes: dict[Kind, ProcessPlan]
    keys: dict[str, bytes]


def make_plan(config: UpConfig, *, gpus: bool, keys: dict[str, bytes] | None) -> Plan:
    """Return the plan for a configuration. ``keys``: of an earlier plan of the same deployment; None: make new ones.

    Raises:
        PlanError: options contradict each other, or a folder of keys cannot be read.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", config.name):
        raise PlanError(f"--name {config.name!r}: letters, digits, '_' and '-', beginning with a letter or a digit")
    least, most = config.min_executors or config.executors, config.max_executors or config.executors
    if not least <= config.executors <= most:
        raise PlanError(f"--executors {config.executors} is not between --min-executors {least} and {most}")
    if config.gateway.plaintext:
        keys = {}
    elif config.scheduler.keys is not None:
        keys = _read_keys(Path(config.scheduler.keys))
    elif not keys:
        keys = _new_keys()
    policy = Policy(
        minimum=least,
        maximum=most,
        queue=config.scale_queue,
        # Executors never choose fewer by their device. Too few rows here only keep an executor longer than necessary.
        rows=config.executor.max_num_seqs or DEFAULT_NUM_SEQS,
        up_after=config.scale_up_after,
        down_after=config.scale_down_after,
    )
    return Plan(
        name=config.name,
        gateways=config.gateways,
        executors=config.executors,
        policy=policy,
        processes=_processes(config, keys, gpus),
        keys=keys,
    )


def _processes(config: UpConfig, keys: dict[str, bytes], gpus: bool) -> dict[Kind, ProcessPlan]:
    variables, metrics_key = _gateway_secrets(config, keys)
    executor = config.executor
    if executor.threads == "auto":
        executor = replace(executor, threads=config.executor_cpus)
    processes: dict[Kind, ProcessPlan] = {
        "scheduler": ProcessPlan(
            kind="scheduler",
            argv=to_argv(replace(config.scheduler, keys=None, gateways_end_any_request=True)),
            variables={},
            keys=_keys_of(keys, "scheduler"),
            cpus=1,
            drain_seconds=_GRACE_SECONDS,
        ),
        "gateway": ProcessPlan(
            kind="gateway",
            argv=to_argv(replace(config.gateway, keys=None)),
            variables=variables,
            keys=_keys_of(keys, "gateway"),
            metrics_key=metrics_key,
            cpus=1,
            drain_seconds=config.gateway.shutdown_timeout + _GRACE_SECONDS,
            end_seconds=config.gateway.shutdown_timeout + _GRACE_SECONDS,
        ),
        "executor": ProcessPlan(
            kind="executor",
            argv=to_argv(replace(executor, keys=None)),
            variables={},
            keys=_keys_of(keys, "executor"),
            served=Served.by(executor),
            cpus=config.executor_cpus,
            gpus=int(gpus),
            ranks=executor.tensor_parallel,
            drain_seconds=executor.drain_timeout + _GRACE_SECONDS,
        ),
    }
    return {kind: _sealed(process) for kind, process in processes.items()}


def _sealed(process: ProcessPlan) -> ProcessPlan:
    process = replace(process, version=package_version())
    return replace(process, digest=hashlib.sha256(msgspec.msgpack.encode(process)).hexdigest()[:16])


def _gateway_secrets(config: UpConfig, keys: dict[str, bytes]) -> tuple[dict[str, str], str]:
    """Return the secrets of gateways, and an additional API key for reading their metrics."""
    variables = secret_variables(config.gateway)
    given = config.gateway.api_keys
    if not given and not config.gateway.api_keys_file:
        return variables, ""
    if given and re.fullmatch(_SOLE_KEY, given.strip()):
        given = f"default: {given.strip()} operator=yes"  # as gateways read a key that is alone
    # Derived from another secret of the deployment, so that the same options make the same plan.
    seed = keys.get("scheduler/scheduler.key_secret") or (given or secrets.token_hex()).encode()
    own = "pw-" + hashlib.sha256(b"metrics " + seed).hexdigest()[:40]
    entry = f"pagewise-controller: {own} operator=yes"
    return variables | {"PAGEWISE_API_KEYS": f"{given}, {entry}" if given else entry}, own


def _keys_of(keys: dict[str, bytes], name: str) -> dict[str, bytes]:
    """Return the files of the public keys and of the pair ``name``, sorted for a stable digest."""
    return {path: content for path, content in sorted(keys.items()) if path.split("/")[0] in ("public", name)}


def _new_keys() -> dict[str, bytes]:
    with tempfile.TemporaryDirectory(prefix="pagewise-") as folder, contextlib.redirect_stdout(io.StringIO()):
        if make_keys(["--keys", folder, "init"]):
            raise PlanError("keys cannot be made")
        return _read_keys(Path(folder))


def missing_pair(keys: dict[str, bytes]) -> str | None:
    """Return the name of a necessary key pair that is not among ``keys``; None: all are there."""
    names = ("scheduler", "executor", "gateway")
    return next((name for name in names if f"{name}/{name}.key_secret" not in keys), None)


def _read_keys(folder: Path) -> dict[str, bytes]:
    try:
        files = sorted(path for path in folder.rglob("*") if path.suffix in (".key", ".key_secret") and path.is_file())
        found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
    except OSError as error:
        raise PlanError(f"--keys {folder}: {error.filename} cannot be read: {error.strerror}") from error
    if (name := missing_pair(found)) is not None:
        raise PlanError(f"--keys {folder} has no pair {name}: run `pagewise keys init`")
    return found


def difference(old: Served, new: Served, settings: Callable[[], Any]) -> str:
    """Return the option that makes ``new`` another model than ``old``, with both values; empty if none does.

    ``settings``: returns the content of the model's config.json; called only if the answer depends on it. Its errors
    pass through.
    """

    def first(names: tuple[str, ...]) -> str:
        name = next((name for name in names if getattr(old, name) != getattr(new, name)), None)
        if name is None:
            return ""
        flag = "MODEL" if name == "model" else f"--{name.replace('_', '-')}"
        return f"{flag} {getattr(old, name)}, and not {getattr(new, name)}"

    if found := first(_ALWAYS):
        return found
    if new.simulate:
        return ""
    if (found := first(("max_model_len",))) and _has_length_dependent_rope(settings()):
        return f"{found} (on which the RoPE of this model depends)"
    if (found := first(_WHERE_QUANTISED)) and (new.quantization != "none" or _is_quantised(settings())):
        return f"{found} (on which the tokens of a quantised model depend)"
    return ""


def settings_of(served: Served) -> Any:
    """Return the content of a model's config.json.

    Raises:
        ModelError: the model is not here, or its config.json cannot be read.
    """
    path = resolve_model(served.model, served.revision, tokenizer_only=True) / "config.json"
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error


def _is_quantised(settings: Any) -> bool:
    parts = [settings, settings.get("text_config") or {}]
    return any(part.get(name) for part in parts for name in ("quantization_config", "compression_config"))


def _has_length_dependent_rope(settings: Any) -> bool:
    # Layers, and parts of a model, may have a RoPE each.
    if isinstance(settings, list):
        return any(map(_has_length_dependent_rope, settings))
    if not isinstance(settings, dict):
        return False
    named = settings.get("rope_type"), settings.get("type")
    return any(name in _LENGTH_DEPENDENT for name in named) or any(map(_has_length_dependent_rope, settings.values()))
