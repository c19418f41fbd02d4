"""What runs already where ``pagewise up`` is called: its keys are kept, and its model cannot change."""

import time
from contextlib import suppress
from typing import Any

from msgspec import convert
from pagewise_shared.errors import ModelError

from pagewise.cluster.plan import CONTROLLER, PlanError, missing_pair
from pagewise.cluster.served import Served, difference, settings_of

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
    """Return the keys of the deployment that runs already, and what it serves; None: nothing runs.

    Processes are asked if there is no controller, as where ``pagewise up`` was interrupted while it replaced it.
    ``name``: of the deployment. ``patience``: seconds for which something may run and not answer, as while Ray starts
    the controller again.

    Raises:
        PlanError: something runs, and does not answer.
    """
    import ray

    deadline = time.monotonic() + patience
    while there := actors():
        asked = [actor.kept.remote() for actor in ([there[CONTROLLER]] if CONTROLLER in there else there.values())]
        answered, _ = ray.wait(asked, num_returns=len(asked), timeout=_ANSWER_SECONDS)
        said = []
        for ref in answered:
            with suppress(ray.exceptions.RayError):  # it has gone, or is being started again
                said.append(ray.get(ref))
        keys = {path: content for one in said for path, content in one["keys"].items()}
        served = next((one["served"] for one in said if one["served"] is not None), None)
        known = served is not None or not any(one.startswith((CONTROLLER, "executor")) for one in there)
        if said and known and not (keys and missing_pair(keys)):
            return keys, convert(served, Served | None)
        if time.monotonic() > deadline:
            raise PlanError(
                f"{', '.join(sorted(there))} run, and do not tell their keys and what they serve: try again, or end "
                f"them first (pagewise down --name {name})"
            )
        time.sleep(0.5)
    return None, None


def check_served(name: str, old: Served, new: Served) -> None:
    """Check that executors with the options of before and those with the new ones serve the same model.

    Raises:
        PlanError: they do not, or nobody can tell.
    """
    instead = f"End it first: pagewise down --name {name}"
    try:
        found = difference(old, new, lambda: settings_of(new))
    except ModelError as error:
        raise PlanError(
            f"nobody can tell here whether what runs serves the same model with other options: {error}. {instead}"
        ) from error
    if found:
        raise PlanError(
            f"what runs serves {found}: its executors would go on with the model of before, under the new name. "
            f"{instead}"
        )
