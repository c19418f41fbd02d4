"""``pagewise up``, ``down``, ``status`` and ``logs``: a deployment on a Ray cluster."""

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from pagewise_shared.config import UpConfig, parse_config
from pagewise_shared.logs import configure_logging
from pagewise_shared.service_process import warn_of_variables
from pagewise_shared.version import package_version

from pagewise.cluster.plan import CONTROLLER, NAMESPACE, Plan, PlanError, Served, in_short, make_plan
from pagewise.cluster.reconcile import KINDS
from pagewise.cluster.running import actors, check_served, kept
from pagewise.ports import answers

_ANSWER_SECONDS = 15.0
_RESTART_SECONDS = 90.0
"""For Ray to start the controller, or to start it again."""
_STOP_ORDER = ("gateway", "executor", "scheduler")
"""Gateways first, so that streams can end; the scheduler last, so that the others can leave it in good order."""


def up(arguments: Sequence[str]) -> int:
    """Start a deployment, or change one that runs; returns the process's exit code."""
    config = parse_config(
        UpConfig,
        arguments,
        prog="pagewise up",
        description="Start a scheduler, gateways and executors on a Ray cluster, which places them and starts them "
        "again; or change the options of what runs there. Returns when the model is served.",
    )
    configure_logging(config.scheduler.log_level, "up", config.scheduler.log_format)
    warn_of_variables()
    with _connected(config.ray, config.name):
        plan = _plan(config)
        if not config.gateway.api_keys and not config.gateway.api_keys_file:
            print("There are no API keys: whoever reaches the gateways is let in.", file=sys.stderr)
        _replace_controller(plan)
        return _wait_ready(config)


def down(arguments: Sequence[str]) -> int:
    """End a deployment; returns the process's exit code."""
    parser = _parser("down", "End all processes of a deployment on a Ray cluster, in good order.")
    options = parser.parse_args(arguments)
    with _connected(options.ray, options.name):
        return _end(options.name)


def status(arguments: Sequence[str]) -> int:
    """Print processes and their nodes; returns 0 if all wanted ones are ready, 3 if not, 1 without an answer."""
    options = _parser("status", "Print which processes of a deployment run on which nodes.").parse_args(arguments)
    with _connected(options.ray, options.name):
        import ray

        report = ray.get(_controller().report.remote(), timeout=_ANSWER_SECONDS)
        _print_report(report)
        return 0 if _all_ready(report) else 3


def logs(arguments: Sequence[str]) -> int:
    """Print the last lines of processes, and the controller's decisions; returns the process's exit code."""
    parser = _parser("logs", "Print the last log lines of the processes of a deployment.")
    parser.add_argument("names", nargs="*", metavar="PROCESS", help=f"as in pagewise status, or {CONTROLLER}")
    parser.add_argument("-n", "--lines", type=_count, default=50, metavar="N", help="last lines of each (default: 50)")
    parser.add_argument("-f", "--follow", action="store_true", help="go on with what they log from now on")
    options = parser.parse_args(arguments)
    with _connected(options.ray, options.name):
        _print_lines(options.names, options.lines, options.follow)
    return 0


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise ValueError(f"{number} is negative")
    return number


_count.__name__ = "number of lines"  # argparse names it in errors


def _parser(command: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"pagewise {command}", description=description)
    fields = ("ray", "auto", "ADDRESS of the Ray cluster"), ("name", "pagewise", "NAME of the deployment")
    for name, default, text in fields:
        given = os.environ.get(f"PAGEWISE_{name.upper()}") or default
        parser.add_argument(f"--{name}", default=given, help=f"{text} (default: {given})")
    return parser


@contextmanager
def _connected(address: str, name: str) -> Iterator[None]:
    """Connect to the Ray cluster for the time of the context.

    Raises:
        PlanError: Ray is not installed, or there is no cluster, or a call of Ray within the context failed.
    """
    try:
        import ray
    except ImportError as error:
        raise PlanError("Ray is not installed: pip install 'pagewise[ray]', here and on every node") from error
    try:
        ray.init(address=address, namespace=NAMESPACE + name, log_to_driver=False, logging_level="error")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise PlanError(f"no Ray cluster at {address}: {error}") from error
    try:
        yield
    except ray.exceptions.GetTimeoutError as error:
        raise PlanError("the controller does not answer: Ray may be starting it again") from error
    except ray.exceptions.RayError as error:
        raise PlanError(in_short(error)) from error
    finally:
        ray.shutdown()


def _controller() -> Any:
    import ray

    try:
        return ray.get_actor(CONTROLLER)
    except ValueError as error:
        raise PlanError("nothing of this name runs in the cluster") from error


def _plan(config: UpConfig) -> Plan:
    """Return the plan for the cluster as it is, with the keys of the running deployment.

    Raises:
        PlanError: there is no room for an executor, or the running deployment serves another model.
    """
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    device, simulated = config.executor.device, config.executor.simulate
    gpus = not simulated and (device == "cuda" or (device == "auto" and any("GPU" in node for node in nodes)))
    need = {"CPU": config.executor_cpus} | ({"GPU": 1} if gpus else {})
    _check_room(nodes, need, config.executor.tensor_parallel)
    keys, served = kept(config.name, _RESTART_SECONDS)
    plan = make_plan(config, gpus=gpus, keys=keys)
    if served is not None:
        check_served(config.name, served, Served.by(config.executor))
    return plan


def _check_room(nodes: list[dict[str, float]], need: dict[str, int], ranks: int) -> None:
    room = sum(min(int(node.get(resource, 0) // count) for resource, count in need.items()) for node in nodes)
    if room >= ranks:
        return
    each = " and ".join(f"{count} {resource}" for resource, count in need.items())
    if ranks == 1:
        raise PlanError(f"no node of the cluster has {each}, which an executor needs")
    raise PlanError(f"--tensor-parallel {ranks}: the cluster has room for {room} ranks, which take {each} each")


def _replace_controller(plan: Plan) -> None:
    """Start a controller with this plan, in the place of the running one, if any."""
    import ray

    from pagewise.cluster.controller import Controller, head_if_possible

    deadline = time.monotonic() + _RESTART_SECONDS
    while True:
        with suppress(PlanError):
            ray.kill(_controller())
        try:
            actor = (
                ray.remote(Controller)
                .options(
                    name=CONTROLLER,
                    lifetime="detached",
                    max_restarts=-1,
                    num_cpus=0,
                    max_concurrency=4,
                    scheduling_strategy=head_if_possible(),
                )
                .remote(plan)
            )
        except ValueError as error:
            # The last one may still be known by this name.
            if "already taken" not in str(error) or time.monotonic() > deadline:
                raise PlanError(f"the controller cannot be started: {in_short(error)}") from error
            time.sleep(0.2)
            continue
        ray.get(actor.report.remote(), timeout=_RESTART_SECONDS)
        return


def _wait_ready(config: UpConfig) -> int:
    """Print the controller's decisions until everything is ready; return the exit code."""
    import ray

    printed = 0
    while True:
        controller = _controller()
        try:
            count, lines = ray.get(controller.lines.remote(printed))
            report = ray.get(controller.report.remote())
        except ray.exceptions.RayActorError:  # it is being started again
            printed = 0
            time.sleep(0.5)
            continue
        printed = count
        for line in lines:
            print(line, file=sys.stderr, flush=True)
        current = _current(report)
        _check_versions(current)
        if problems := [
            *(name for name, one in current.items() if one.problem),
            *map("the next {}".format, report["failing"]),
        ]:
            print(
                f"pagewise up: {', '.join(problems)} cannot start: see above. It is tried again; "
                "`pagewise logs` prints more, `pagewise down` ends everything.",
                file=sys.stderr,
            )
            return 1
        urls = _urls(current)
        if _all_ready(report) and any(answers(f"{url}/health") for url in urls):
            name = config.gateway.served_model_name or config.gateway.model
            print(f"\nServing {name} at {' and '.join(urls)}", flush=True)
            return 0
        time.sleep(0.5)


def _current(report: dict[str, Any]) -> dict[str, Any]:
    """Return the descriptions of processes with the current options. Others will be replaced."""
    return {
        name: one
        for name, (one, _) in report["processes"].items()
        if one is not None and one.digest == report["digests"][name.rsplit("-", 1)[0]]
    }


def _urls(descriptions: dict[str, Any]) -> list[str]:
    return sorted(
        one.listening[0] for name, one in descriptions.items() if name.startswith("gateway") and one.listening
    )


def _check_versions(descriptions: dict[str, Any]) -> None:
    for one in descriptions.values():
        if one.version != package_version():
            raise PlanError(f"node {one.address} has Pagewise {one.version}, and this is {package_version()}")


def _all_ready(report: dict[str, Any]) -> bool:
    """Return whether the wanted number of processes is ready, with the current options, and no others are left."""
    ready = dict.fromkeys(KINDS, 0)
    for name, (described, stopping) in report["processes"].items():
        kind = name.rsplit("-", 1)[0]
        if described is None or stopping or described.digest != report["digests"][kind]:
            return False
        ready[kind] += described.state == "ready"
    return bool(ready == report["wanted"])


def _print_report(report: dict[str, Any]) -> None:
    print(f"{'process':<14}{'state':<10}{'node':<18}{'pid':>8}{'restarts':>10}{'load':>6}  address")
    for name, (described, stopping) in report["processes"].items():
        if described is None:
            print(f"{name:<14}{'pending':<10}Ray has no room for it yet, or has not placed it")
            continue
        load = report["loads"].get(name, "")
        state = "stopping" if stopping else described.state
        rest = described.problem and f"cannot start: {described.problem}"
        print(
            f"{name:<14}{state:<10}{described.address:<18}{described.pid or '':>8}{described.restarts:>10}{load:>6}"
            f"  {rest or ' '.join(described.listening)}".rstrip()
        )
    for kind in report["failing"]:
        print(f"{kind}: the last ones died before they answered; new ones are started after pauses")
    print("wanted: " + ", ".join(f"{kind} {count}" for kind, count in report["wanted"].items()))


def _print_lines(names: Sequence[str], count: int, follow: bool) -> None:
    """Print the last lines, each after the name of its process."""
    import ray

    printed: dict[str, int] = {}
    while True:
        there = actors()
        if unknown := set(names) - there.keys() - printed.keys():
            raise PlanError(
                f"there is no {', '.join(sorted(unknown))}; there are: {', '.join(sorted(there)) or 'none'}"
            )
        for name in sorted(there.keys() & set(names or there)):
            try:
                number, lines = ray.get(there[name].lines.remote(printed.get(name, 0)), timeout=_ANSWER_SECONDS)
            except ray.exceptions.RayError:  # it has gone, or waits for room
                continue
            for line in lines if name in printed else lines[len(lines) - min(count, len(lines)) :]:
                print(f"{name:<12} | {line}", flush=True)
            printed[name] = number
        if not follow:
            return
        time.sleep(1.0)


def _end(deployment: str) -> int:
    # The controller ends first, so that it starts nothing again.
    import ray

    from pagewise.cluster.controller import remove_groups

    found = False
    while there := actors():
        found = True
        if CONTROLLER in there:
            ray.kill(there.pop(CONTROLLER))
        for kind in _STOP_ORDER:
            _end_processes({name: actor for name, actor in sorted(there.items()) if name.startswith(kind)})
        time.sleep(0.2)
    remove_groups(deployment)
    if not found:
        print(f"pagewise down: nothing of the name {deployment} runs in the cluster", file=sys.stderr)
    return 0


def _end_processes(some: dict[str, Any]) -> None:
    import ray

    for name in some:
        print(f"{name} is to go", file=sys.stderr, flush=True)
    # Actors that Ray has not placed do not answer, and have nothing to end.
    asked = {actor.describe.remote(): actor for actor in some.values()}
    placed, _ = ray.wait(list(asked), num_returns=len(asked), timeout=2.0) if asked else ([], [])
    if ends := [asked[ref].stop.remote(False) for ref in placed]:
        ray.wait(ends, num_returns=len(ends), timeout=None)  # each has its own bound
    for actor in some.values():
        ray.kill(actor)
