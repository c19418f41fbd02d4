"""Connections to the scheduler that die without a word, as they do where packets are lost, are made again soon."""

import asyncio
import contextlib

import pytest
import zmq
import zmq.asyncio
from pagewise_shared import scheduler_connection
from pagewise_shared.connections import Connections
from pagewise_shared.scheduler_connection import SchedulerAddress, make_dealer, watch_connection

GREETING_BYTES = 64


class Relay:
    """A proxy in front of a port. Of its first connection, only ``answered`` bytes of the port's answers get
    through."""

    def __init__(self, port: int, answered: int) -> None:
        self.port, self.answered = port, answered
        self.connections: list[asyncio.StreamWriter] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = not self.connections
        from_port, to_port = await asyncio.open_connection("127.0.0.1", self.port)
        self.connections += [writer, to_port]
        await asyncio.gather(self._pass(reader, to_port, None), self._pass(from_port, writer, 0 if first else None))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, passed: int | None) -> None:
        """Pass bytes on, all of them or the first ones; the end of a connection is never passed on."""
        while data := await reader.read(4096):
            if passed is not None:
                data = data[: self.answered - passed]
                passed += len(data)
            writer.write(data)


@pytest.mark.parametrize("answered", [0, GREETING_BYTES], ids=["nothing arrives", "the last message does not arrive"])
async def test_a_handshake_whose_answer_is_lost_is_begun_again(answered: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_connection, "HANDSHAKE_MS", 300)
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as router:
        relay = Relay(router.bind_to_random_port("tcp://127.0.0.1"), answered)
        server = await asyncio.start_server(relay, "127.0.0.1", 0)
        address = SchedulerAddress(f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        dealer = make_dealer(context, None, 1000)
        dealer.linger = 0
        connections = Connections(dealer)
        dealer.connect(address.endpoint)
        watch = asyncio.create_task(watch_connection(connections, dealer, address, None, lambda: None))
        try:
            async with asyncio.timeout(10):
                await dealer.send(b"hello")
                assert (await router.recv_multipart())[1] == b"hello"
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
            connections.close()
            dealer.close()
            server.close()
            for writer in relay.connections:
                writer.close()
                with contextlib.suppress(ConnectionError):
                    await writer.wait_closed()
