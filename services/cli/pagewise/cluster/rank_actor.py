"""The actor that holds the process of a rank other than rank 0: on another node, or for the sake of its GPU alone."""

import asyncio
import contextlib
import os
import signal
from pathlib import Path
from typing import Any

from pagewise.cluster.plan import ProcessPlan
from pagewise.cluster.private_folder import PrivateFolder
from pagewise.process import Service

FOLDER = "pagewise-process-"
"""The prefix of the names of folders with keys."""


class RankActor:
    """Holds the place of a rank in an executor's placement group, and the rank's process, if it is a separate one.

    The actor of rank 0 makes it, and it ends with that actor. ``name``: of the executor. ``owner``: the actor of rank
    0, which keeps the log lines of the process.
    """

    def __init__(self, name: str, plan: ProcessPlan, rank: int, owner: Any) -> None:
        self._name, self._plan, self._rank, self._owner = f"{name}/{rank}", plan, rank, owner
        self._address = place()[0]
        self._folder = PrivateFolder(FOLDER)
        self._service: Service | None = None

    async def gpus(self) -> list[str]:
        """Return the GPUs of this place."""
        return own_gpus()

    async def run(self, host: str, port: str) -> int:
        """Run the process, which joins rank 0 at ``host`` and ``port``, to its end; returns its exit code."""
        argv = [
            *self._plan.argv,
            *key_option(self._folder, self._plan.keys),
            *node_options(self._plan.ranks, self._rank, host, port),
            *block_options(self._address),
        ]
        self._service = Service(self._name, self._plan.module, argv, on_log=self._send_line)
        return await self._service.run()

    async def end(self) -> None:
        """End the process, if it runs: rank 0 has ended."""
        if self._service is not None:
            await self._service.stop(signal.SIGINT, self._plan.end_seconds)

    async def close(self) -> None:
        """End the process, and remove its folder."""
        await self.end()
        self._folder.remove()

    def _send_line(self, line: str) -> None:
        self._owner.log_of_rank.remote(self._rank, line)


class Ranks:
    """The other ranks of an executor, seen from the actor that holds rank 0.

    ``apart``: whether each rank has a separate process, because the ranks are on several nodes of Ray's.
    """

    def __init__(self, name: str, plan: ProcessPlan) -> None:
        self._name, self._plan = name, plan
        self._actors: list[Any] = []
        self._runs: list[asyncio.Task[int]] = []
        self.apart = False

    async def take_places(self) -> dict[str, str]:
        """Take the places of the other ranks; return the variables that show rank 0's process its GPUs."""
        plan = self._plan
        if plan.ranks == 1:
            return {}  # Ray has set them for this actor, and the process inherits them
        import ray
        from ray.util.placement_group import get_current_placement_group, placement_group_table
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group = get_current_placement_group()
        nodes = placement_group_table(group)["bundles_to_node_id"]
        self.apart = len(set(nodes.values())) > 1
        if not self.apart and not plan.gpus:
            return {}
        owner = ray.get_runtime_context().current_actor
        self._actors = [
            ray.remote(RankActor)
            .options(
                num_cpus=plan.cpus,
                num_gpus=plan.gpus,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
            )
            .remote(self._name, plan, rank, owner)
            for rank in range(1, plan.ranks)
        ]
        others = [await actor.gpus.remote() for actor in self._actors]
        if self.apart:
            return {}
        return {"CUDA_VISIBLE_DEVICES": ",".join(gpu for some in [own_gpus(), *others] for gpu in some)}

    def options(self, address: str) -> list[str]:
        """Return the options with which rank 0's process lets the others join. ``address``: of this node."""
        return node_options(self._plan.ranks, 0, address, "0") if self.apart else []

    async def run(self, endpoint: str) -> tuple[int, int]:
        """Run the processes of the other ranks until one ends; return its rank and exit code.

        ``endpoint``: where rank 0 waits for them.

        Raises:
            RayError: an actor has gone, and its node perhaps with it.
        """
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self._runs = [
            asyncio.ensure_future(_answer(actor.run.remote(host.strip("[]"), port))) for actor in self._actors
        ]
        done, _ = await asyncio.wait(self._runs, return_when=asyncio.FIRST_COMPLETED)
        first = next(run for run in self._runs if run in done)
        return self._runs.index(first) + 1, first.result()

    async def end(self) -> None:
        """End their processes, and wait for the ends."""
        if not self.apart:
            return
        import ray

        for actor in self._actors:
            with contextlib.suppress(ray.exceptions.RayError):
                await actor.end.remote()
        await asyncio.gather(*self._runs, return_exceptions=True)

    async def close(self) -> None:
        """End their processes, and remove their folders."""
        for actor in self._actors:
            with contextlib.suppress(Exception):  # it has gone
                await actor.close.remote()


async def _answer(ref: Any) -> int:
    return int(await ref)


def place() -> tuple[str, str]:
    """Return the address of this node, and Ray's id of it."""
    import ray

    return ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id()


def own_gpus() -> list[str]:
    """Return the GPUs that Ray has given to this actor."""
    import ray

    ids: dict[str, list[Any]] = ray.get_runtime_context().get_accelerator_ids()
    return [str(each) for each in ids.get("GPU", [])]


def node_options(ranks: int, number: int, host: str, port: str) -> list[str]:
    """Return the options of one of several processes with a rank each."""
    return [f"--nnodes={ranks}", f"--node-rank={number}", f"--master-addr={host}", f"--master-port={port}"]


def block_options(address: str) -> list[str]:
    """Return the options by which other executors fetch blocks on a node with this address."""
    return [f"--block-listen=tcp://{in_brackets(address)}:*", f"--advertise={address}"]


def in_brackets(address: str) -> str:
    """Return an address as an endpoint has it."""
    return f"[{address}]" if ":" in address else address


def key_option(folder: PrivateFolder, keys: dict[str, bytes]) -> list[str]:
    """Write keys into a folder; return the option that names it, or none without keys."""
    if not keys:
        return []
    path = folder.path() / "keys"
    write_private(path, keys)
    return [f"--keys={path}"]


def write_private(folder: Path, files: dict[str, bytes]) -> None:
    """Write files that their owner alone can read."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(content)
