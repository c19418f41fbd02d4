"""The deployment that runs when ``pagewise up`` is called: its keys are kept, and its model cannot change."""

import time
from contextlib import suppress
from typing import Any

from msgspec import convert
from pagewise_shared.errors import ModelError

from pagewise.cluster.plan import CONTROLLER, PlanError, Served, difference, missing_pair, settings_of

_ANSWER_SECONDS = 15.0


def actors() -> dict[str, Any]:
    """Return the actors of the deployment by name."""
    import ray

    found = {}
    for name in ray.util.list_named_actors():
        with suppress(ValueError):  # gone since it was listed
            found[name] = ray.get_actor(name)
    return found


def kept(name: str, patience: float) -> tuple[dict[str, bytes] | None, Served | None]:
    """Return the keys and the model options of the running deployment ``name``; None: nothing runs.

    Without a controller, as after an interrupted ``pagewise up``, its processes answer. ``patience``: seconds in which
    they may not answer, as while Ray starts the controller again.

    Raises:
        PlanError: a deployment runs, and does not answer.
    """
    deadline = time.monotonic() + patience
    while there := actors():
        keys: dict[str, bytes] = {}
        served = None
        for one in (answers := _kept_by(there)):
            keys |= one["keys"]
            served = served or one["served"]
        # Gateways and the scheduler do not know the options of executors.
        known = served is not None or not _among(there, CONTROLLER, "executor")
        if answers and known and not (keys and missing_pair(keys)):
            return keys, convert(served, Served | None)
        if time.monotonic() > deadline:
            raise PlanError(
                f"{', '.join(sorted(there))} run, and do not report their keys and options: try again, or end them "
                f"first (pagewise down --name {name})"
            )
        time.sleep(0.5)
    return None, None


def _among(there: dict[str, Any], *kinds: str) -> bool:
    return any(name.startswith(kinds) for name in there)


def _kept_by(there: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the answer of the controller, or the answers of the processes if there is no controller."""
    import ray

    asked = [there[CONTROLLER]] if CONTROLLER in there else there.values()
    refs = [actor.kept.remote() for actor in asked]
    answered, _ = ray.wait(refs, num_returns=len(refs), timeout=_ANSWER_SECONDS)
    found = []
    for ref in answered:
        with suppress(ray.exceptions.RayError):  # it has gone, or is being started again
            found.append(ray.get(ref))
    return found


def check_served(name: str, old: Served, new: Served) -> None:
    """Check that executors with the old and with the new options serve the same model.

    Raises:
        PlanError: they do not, or that is unknown.
    """
    instead = f"End it first: pagewise down --name {name}"
    try:
        found = difference(old, new, lambda: settings_of(new))
    except ModelError as error:
        raise PlanError(
            f"it is unknown here whether the running executors serve the same model with other options: {error}. "
            f"{instead}"
        ) from error
    if found:
        raise PlanError(
            f"the deployment serves {found}: its executors would keep the old model, under the new name. {instead}"
        )
