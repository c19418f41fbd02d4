"""A file with the scheduler's address, and the processes that follow it."""

import asyncio
from pathlib import Path

import pytest
import zmq
import zmq.asyncio
from pagewise_shared.errors import ConfigError
from pagewise_shared.scheduler_connection import SchedulerAddress, follow_scheduler, make_dealer


async def test_a_scheduler_that_moves_is_followed_by_its_file(tmp_path: Path) -> None:
    file, new = tmp_path / "scheduler", tmp_path / "new"
    file.write_text(f"ipc://{tmp_path}/first\n")
    with zmq.asyncio.Context() as context:
        places = {name: context.socket(zmq.ROUTER) for name in ("first", "second")}
        for name, router in places.items():
            router.bind(f"ipc://{tmp_path}/{name}")
        dealer = make_dealer(context, None, 1000)
        address = SchedulerAddress(f"file:{file}")
        dealer.connect(address.endpoint)
        moved = asyncio.Event()
        follow = asyncio.create_task(follow_scheduler(dealer, address, moved.set))
        try:
            await dealer.send(b"one")
            assert (await places["first"].recv_multipart())[1] == b"one"
            new.write_text(f"ipc://{tmp_path}/second\n")
            new.rename(file)
            await moved.wait()
            # Messages sent at once may be lost with the old connection: Hellos are sent until answered.
            arrives = asyncio.ensure_future(places["second"].recv_multipart())
            while not arrives.done():
                await dealer.send(b"two")
                await asyncio.wait([arrives], timeout=0.05)
            assert (await arrives)[1] == b"two"
        finally:
            follow.cancel()
            await asyncio.gather(follow, return_exceptions=True)
            for socket in (dealer, *places.values()):
                socket.close(linger=0)


def test_a_file_that_does_not_say_where_the_scheduler_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        SchedulerAddress(f"file:{tmp_path}/none")
    (tmp_path / "empty").touch()
    with pytest.raises(ConfigError, match="is empty"):
        SchedulerAddress(f"file:{tmp_path}/empty")
