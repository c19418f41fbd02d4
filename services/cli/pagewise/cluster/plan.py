"""What should run in a cluster: the processes of each kind, their arguments, keys and resources. No Ray here."""

import contextlib
import hashlib
import io
import re
import secrets
import tempfile
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace
from pagewise_shared.config import DEFAULT_NUM_SEQS, UpConfig, secret_variables, to_argv
from pagewise_shared.version import package_version

from pagewise.cluster.reconcile import Kind
from pagewise.cluster.scaling import Policy
from pagewise.cluster.served import Served
from pagewise.errors import CommandError
from pagewise.keys import keys as make_keys

NAMESPACE = "pagewise."
"""What the names of our namespaces in Ray begin with; the name of the deployment follows."""
CONTROLLER = "controller"
"""Name of the actor that starts and stops all others."""

_MODULES: dict[Kind, str] = {kind: f"pagewise_{kind}.main" for kind in ("scheduler", "gateway", "executor")}
_GRACE_SECONDS = 10.0
_SOLE_KEY = r"[^\s,:#]+"
"""An API key without a name."""


class PlanError(CommandError):
    """What was asked for cannot run in a cluster; the text says why."""


def in_short(error: Exception) -> str:
    """Return the first line of an error's text, and the last exception in it, which Ray puts below its own words."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    raised = [line for line in lines[1:] if re.match(r"[\w.]*(Error|Exception): ", line)]
    return " ... ".join([lines[0].strip(), *raised[-1:]])


class ProcessPlan(Struct, frozen=True, kw_only=True):
    """How the processes of one kind are started.

    Fields:
        argv: without what depends on the node: addresses, names, and where the keys are.
        variables, keys: secrets. The latter are the contents of the files of a folder of keys, by their paths in it.
        metrics_key: of a gateway: an API key with which its metrics may be read; empty if there are no API keys.
        served: by an executor.
        cpus, gpus: of each rank. ranks: how many an executor has.
        drain_seconds, end_seconds: how long it may take to go in good order, or to end at once.
        version: of Pagewise, as of who made the plan.
        digest: of all of this.
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
    """Make the plan for a configuration. ``keys``: of an earlier plan of the same deployment; None: make new ones.

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
        # What executors choose by their device is never less, and too few keep an executor that might have gone.
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
    """Return how the processes of each kind are started."""
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
    """Return the secrets of gateways, and an API key for reading their metrics, which is added to those of clients."""
    variables = secret_variables(config.gateway)
    given = config.gateway.api_keys
    if not given and not config.gateway.api_keys_file:
        return variables, ""
    if given and re.fullmatch(_SOLE_KEY, given.strip()):
        given = f"default: {given.strip()} operator=yes"  # what gateways make of it where it is alone
    # Derived from another secret of the deployment, so that the same options make the same plan.
    seed = keys.get("scheduler/scheduler.key_secret") or (given or secrets.token_hex()).encode()
    own = "pw-" + hashlib.sha256(b"metrics " + seed).hexdigest()[:40]
    entry = f"pagewise-controller: {own} operator=yes"
    return variables | {"PAGEWISE_API_KEYS": f"{given}, {entry}" if given else entry}, own


def _keys_of(keys: dict[str, bytes], name: str) -> dict[str, bytes]:
    """Return the files of the public keys, and of the pair of ``name``, in an order that does not depend on theirs."""
    return {path: content for path, content in sorted(keys.items()) if path.split("/")[0] in ("public", name)}


def _new_keys() -> dict[str, bytes]:
    with tempfile.TemporaryDirectory(prefix="pagewise-") as folder, contextlib.redirect_stdout(io.StringIO()):
        if make_keys(["--keys", folder, "init"]):
            raise PlanError("keys cannot be made")
        return _read_keys(Path(folder))


def missing_pair(keys: dict[str, bytes]) -> str | None:
    """Return the name of a key pair that a deployment needs and that is not among ``keys``; None: all are there."""
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
