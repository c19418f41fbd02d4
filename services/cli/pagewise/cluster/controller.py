"""The actor that keeps a deployment as planned: it starts and stops processes, connects them, and scales.

It has no state of its own. Its plan is an argument, which Ray passes again when it restarts the controller, and the
processes describe themselves.
"""

import contextlib
import secrets
import sys
import threading
import time
import traceback
from collections import deque
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import ray
from msgspec.structs import asdict
from prometheus_client.parser import text_string_to_metric_families
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from pagewise.cluster.plan import CONTROLLER, Plan, in_short
from pagewise.cluster.process_actor import Description, ProcessActor, read_description
from pagewise.cluster.reconcile import KINDS, Kind, Member, Start, StartPauses, Stop, reconcile
from pagewise.cluster.scaling import Load, Scaler

_ROUND_SECONDS = 0.5
_ANSWER_SECONDS = 1.0
_METRICS_SECONDS = 3.0
_EVENTS_KEPT = 500


@dataclass(slots=True)
class _Seen:
    """A process actor that exists.

    Fields:
        since: when this controller saw it first, seconds of the monotonic clock.
        described: its last description; None while Ray has not placed it. asked: the pending call for the next one.
        logged_problem: the last problem of its process that was logged.
        reported: of a scheduler's actor, the last status of all processes that was sent to it.
    """

    actor: Any
    since: float
    described: Description | None = None
    asked: Any = None
    stopping: bool = False
    logged_problem: str = ""
    reported: dict[str, dict[str, Any]] | None = None


@dataclass(slots=True)
class _Loads:
    total: Load
    by_executor: dict[str, int] = field(default_factory=dict)


class Controller:
    """Runs rounds on a thread of its own until it is killed. Made as a detached actor by ``pagewise up``."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._seen: dict[str, _Seen] = {}
        self._dead: set[Any] = set()  # handles, which are equal if they are of the same actor
        self._pauses = StartPauses()
        self._events: deque[str] = deque(maxlen=_EVENTS_KEPT)
        self._num_events = 0
        self._scaler = Scaler(plan.policy)
        self._loads: _Loads | None = None
        found = sum(name.startswith("executor-") for name in self._names())
        self._executors = min(max(found or plan.executors, plan.policy.minimum), plan.policy.maximum)
        self._log(f"controller of {plan.name} starts, {len(self._names())} processes are there")
        threading.Thread(target=self._rounds, name="rounds", daemon=True).start()

    def kept(self) -> dict[str, Any]:
        """Return the keys of the deployment, and the options that the next plan must not change.

        The types are builtins, because the caller may be of another version.
        """
        served = self._plan.processes["executor"].served
        return {"keys": self._plan.keys, "served": served and asdict(served)}

    def report(self) -> dict[str, Any]:
        """Return the wanted number of processes, and the processes that are there."""
        wanted = self._wanted()
        return {
            "wanted": dict(wanted),
            "digests": {kind: self._plan.processes[kind].digest for kind in KINDS},
            "loads": dict(self._loads.by_executor) if self._loads is not None else {},
            "failing": self._pauses.failing(),
            "processes": {name: (seen.described, seen.stopping) for name, seen in sorted(self._seen.copy().items())},
        }

    def lines(self, after: int) -> tuple[int, list[str]]:
        """Return the number of decisions, and the decisions after the first ``after`` of them."""
        kept = list(self._events)
        count = min(len(kept), max(0, self._num_events - after))
        return self._num_events, kept[len(kept) - count :]

    def _log(self, text: str) -> None:
        line = f"{datetime.now().astimezone().isoformat(timespec='milliseconds')} {text}"
        print(f"{CONTROLLER:<10} | {line}", file=sys.stderr, flush=True)
        self._events.append(line)
        self._num_events += 1

    def _rounds(self) -> None:
        while True:
            began = time.monotonic()
            try:
                self._round()
            except Exception:  # the next round may succeed: Ray may be busy with a node that has gone
                self._log(f"a round failed: {traceback.format_exc(limit=3)}")
            time.sleep(max(0.05, _ROUND_SECONDS - (time.monotonic() - began)))

    def _round(self) -> None:
        self._look()
        self._point()
        self._report()
        self._measure()
        self._scale()
        for action in reconcile(self._wanted(), self._digests(), self._members()):
            self._act(action)

    def _wanted(self) -> dict[Kind, int]:
        return {"scheduler": 1, "gateway": self._plan.gateways, "executor": self._executors}

    def _digests(self) -> dict[Kind, str]:
        return {kind: process.digest for kind, process in self._plan.processes.items()}

    @staticmethod
    def _names() -> set[str]:
        return {name for name in ray.util.list_named_actors() if name.rsplit("-", 1)[0] in KINDS}

    def _look(self) -> None:
        """Find the process actors that exist, ask each of them, and forget the dead ones."""
        for name in self._names() - self._seen.keys():
            with contextlib.suppress(ValueError):  # gone since it was listed
                if (actor := ray.get_actor(name)) not in self._dead:
                    self._seen[name] = _Seen(actor, time.monotonic())
                    # The last controller may have died before it called start, which may be called twice.
                    actor.start.remote()
        for seen in self._seen.values():
            if seen.asked is None:
                seen.asked = seen.actor.describe.remote()
        asked = {seen.asked: name for name, seen in self._seen.items()}
        answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_ANSWER_SECONDS) if asked else ([], [])
        for ref in answered:
            name = asked[ref]
            seen = self._seen[name]
            seen.asked = None
            try:
                described = read_description(ray.get(ref))
            except ray.exceptions.ActorUnavailableError:
                continue
            except ray.exceptions.RayError as error:
                self._count_death(name, seen, error)
                continue
            self._note(name, seen, described)

    def _note(self, name: str, seen: _Seen, described: Description) -> None:
        if seen.described is None:
            self._pauses.answered(_kind_of(name))
            if not described.digest:
                self._log(f"{name} is of a version that this one does not understand, and will be replaced")
        seen.described = described
        if described.problem != seen.logged_problem:
            seen.logged_problem = described.problem
            if described.problem:
                self._log(f"{name} cannot start: {described.problem}")
        if described.state == "stopped":
            self._log(f"{name} has ended")
            self._forget(name)

    def _count_death(self, name: str, seen: _Seen, error: Exception) -> None:
        """Forget a dead actor. After a death before the first answer, the next start waits."""
        text = f"{name} is gone: {in_short(error)}"
        if seen.described is None:
            text += f"; the next one may start in {self._pauses.died(_kind_of(name), time.monotonic()):g} s"
        self._log(text)
        self._forget(name)

    def _forget(self, name: str) -> None:
        seen = self._seen.pop(name)
        self._dead.add(seen.actor)
        ray.kill(seen.actor)
        remove_groups(self._plan.name, name)

    def _point(self) -> None:
        """Send the address of the scheduler to gateways and executors that do not have it."""
        described = {name: seen.described for name, seen in self._seen.items() if seen.described}
        schedulers = [one for name, one in described.items() if _kind_of(name) == "scheduler" and one.state == "ready"]
        if not schedulers or len(schedulers[0].listening) != 2:
            return
        endpoints = dict(zip(("gateway", "executor"), schedulers[0].listening, strict=True))
        for name, one in described.items():
            if one.scheduler != (endpoint := endpoints.get(_kind_of(name), one.scheduler)):
                self._seen[name].actor.point.remote(endpoint)

    def _report(self) -> None:
        """Send changes of the processes' restarts and problems to the scheduler's actor."""
        services = {
            name: {"restarts": seen.described.restarts, "problem": seen.described.problem}
            for name, seen in sorted(self._seen.items())
            if seen.described
        }
        for name, seen in self._seen.items():
            if name.startswith("scheduler") and seen.described and seen.reported != services:
                seen.reported = services
                seen.actor.report.remote(services)

    def _measure(self) -> None:
        """Read the load from the first gateway that answers, through its actor."""
        self._loads = None
        for name, seen in self._seen.items():
            if name.startswith("gateway") and seen.described and seen.described.listening:
                try:
                    text = ray.get(seen.actor.metrics.remote(), timeout=_METRICS_SECONDS)
                except (AttributeError, ray.exceptions.RayError):  # of a version without it, or just gone
                    continue
                if text is not None:
                    self._loads = loads_of(text)
                    return

    def _scale(self) -> None:
        policy = self._plan.policy
        if policy.minimum == policy.maximum or self._loads is None:
            return
        decision = self._scaler.decide(time.monotonic(), self._loads.total, self._executors)
        if decision is not None:
            self._log(f"executors: {self._executors} -> {decision.executors}, because {decision.reason}")
            self._executors = decision.executors

    def _members(self) -> list[Member]:
        members = []
        for name, seen in self._seen.items():
            kind = _kind_of(name)
            now = seen.described
            # An actor without a description was started lately, by this controller or by the last one.
            digest = now.digest if now is not None else self._plan.processes[kind].digest
            state = "stopping" if seen.stopping else now.state if now is not None else "pending"
            load = self._loads.by_executor.get(name, 0) if self._loads is not None else 0
            members.append(Member(name, kind, digest, state, load, time.monotonic() - seen.since))
        return members

    def _act(self, action: Start | Stop) -> None:
        if isinstance(action, Start):
            if not self._pauses.may_start(action.kind, time.monotonic()):
                return
            try:
                self._start(action.kind, action.name)
            except ValueError:  # Ray has not yet forgotten the last one of this name
                return
            self._log(f"{action.name} starts: {action.reason}")
            return
        seen = self._seen[action.name]
        self._log(f"{action.name} is to go: {action.reason}")
        if seen.described is None:  # Ray never placed it
            self._forget(action.name)
            return
        seen.stopping = True
        seen.actor.stop.remote(True)

    def _start(self, kind: Kind, name: str) -> None:
        process = self._plan.processes[kind]
        strategy: Any = "SPREAD"
        if kind == "scheduler":
            strategy = head_if_possible()
        elif kind == "executor":
            remove_groups(self._plan.name, name)
            bundle = {"CPU": process.cpus} | ({"GPU": process.gpus} if process.gpus else {})
            # Ranks on one node have the fastest way to each other.
            group = placement_group(
                [bundle] * process.ranks,
                strategy="PACK",
                name=f"{_group_prefix(self._plan.name, name)}{secrets.token_hex(4)}",
                lifetime="detached",
            )
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
        actor = (
            ray.remote(ProcessActor)
            .options(
                name=name,
                lifetime="detached",
                num_cpus=process.cpus,
                num_gpus=process.gpus,
                scheduling_strategy=strategy,
            )
            .remote(name, process)
        )
        actor.start.remote()
        self._seen[name] = _Seen(actor, time.monotonic())


def _kind_of(name: str) -> Kind:
    return name.rsplit("-", 1)[0]  # type: ignore[return-value]


def loads_of(text: str) -> _Loads:
    """Return the load of a scheduler from its metrics."""
    waiting = running = ready = 0
    by_executor: dict[str, int] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            match sample.name:
                case "pagewise_num_requests_waiting":
                    waiting += int(sample.value)
                case "pagewise_num_requests_running":
                    running += int(sample.value)
                case "pagewise_executors_ready":
                    ready += int(sample.value)
                case "pagewise_executor_requests_running" | "pagewise_executor_requests_waiting":
                    name = sample.labels["executor"]
                    by_executor[name] = by_executor.get(name, 0) + int(sample.value)
    return _Loads(Load(waiting, running, ready), by_executor)


def head_if_possible() -> Any:
    """Return the strategy that prefers Ray's head node, whose loss ends the cluster anyway."""
    head = next((node for node in ray.nodes() if "node:__internal_head__" in node["Resources"]), None)
    return "DEFAULT" if head is None else NodeAffinitySchedulingStrategy(head["NodeID"], soft=True)


def remove_groups(deployment: str, name: str = "") -> None:
    """Remove the placement groups of an executor, or of all of a deployment."""
    prefix = _group_prefix(deployment, name) if name else f"{deployment}/"
    for group in ray.util.placement_group_table().values():
        if group["name"].startswith(prefix) and group["state"] != "REMOVED":
            with contextlib.suppress(ValueError):  # removed since it was listed
                ray.util.remove_placement_group(ray.util.get_placement_group(group["name"]))


def _group_prefix(deployment: str, name: str) -> str:
    return f"{deployment}/{name}/"
