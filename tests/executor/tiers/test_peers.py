"""Blocks that one executor computed and another fetched give the tokens that transformers gives."""

import contextlib
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
import zmq
from pagewise_executor.block_copies import CopyJob
from pagewise_executor.kv.kv_pool import KVPool
from pagewise_executor.model_runner import ModelRunner
from pagewise_executor.tiers import block_server, peers
from pagewise_executor.tiers.block_copier import BlockCopier
from pagewise_executor.tiers.block_server import FRAME_BYTES, WINDOW, BlockServer
from pagewise_executor.tiers.device import BlockHashes, DeviceTier
from pagewise_executor.tiers.peers import Peers
from pagewise_executor.tiers.tier import Tier
from pagewise_scheduler.core.tiers.peer import PrefixDirectory
from pagewise_scheduler.core.tiers.recovery_plan import RecoveryMode
from pagewise_shared.curve import Keys, public_file
from pagewise_shared.protocol import (
    DEVICE,
    Blocks,
    CancelCopies,
    Copied,
    Found,
    ReadBlocks,
    RemoteTier,
    decode_from_peer,
    encode,
    pack_int32s,
    unpack_int32s,
)

from tests.executor.driver import request, run_requests
from tests.executor.references import reference
from tests.executor.runners import build_runner, peers_at
from tests.model_builders import VOCAB_SIZE, model_fixture
from tests.shared.key_pairs import make_key_pairs

model_path = model_fixture("llama", seed=5)


@pytest.fixture(scope="module")
def runners(model_path: Path) -> Iterator[tuple[ModelRunner, ModelRunner]]:
    both = build_runner(model_path, exchange=peers_at()), build_runner(model_path, exchange=peers_at())
    yield both
    for runner in both:
        runner.close()


@pytest.mark.parametrize("mode", ["swap", "both", "recompute", "auto"])
@pytest.mark.parametrize("peer_blocks", [400, 22])
def test_what_a_peer_has_computed_is_used(
    model_path: Path, runners: tuple[ModelRunner, ModelRunner], mode: RecoveryMode, peer_blocks: int
) -> None:
    holder, fetcher = runners
    rng = random.Random(3)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (100, 41, 64)]
    more = [[*prompt, 5, 6, 7] for prompt in prompts]
    expected = reference(model, prompts + more, [8] * 6, "cpu")
    directory = PrefixDirectory()
    first = [request(prompt, 8, name=f"a{i}") for i, prompt in enumerate(prompts)]
    # With 22 blocks some of them are on the holder's host by then.
    theirs, _ = run_requests(holder, first, num_blocks=peer_blocks, recovery="swap", directory=directory)
    again = [request(prompt, 8, name=f"b{i}") for i, prompt in enumerate(more)]
    scheduler, _ = run_requests(fetcher, again, recovery=mode, directory=directory)
    for served, tokens in zip(first + again, expected, strict=True):
        assert served.sequences[0].output_token_ids.tolist() == tokens
    counters = scheduler.kv.pool.counters
    if mode == "swap":
        assert counters.fetched == 12 + 5 + 8
        assert [one.cached_tokens["peer"] for one in again] == [96, 40, 64]
    elif mode == "recompute":
        assert counters.fetched == 0
    assert counters.fetch_failed == 0
    assert theirs.kv.pool.num_remote_pins == theirs.kv.pool.num_in_use == 0
    assert scheduler.kv.num_available == scheduler.kv.pool.num_blocks


def test_a_peer_that_was_reset_refuses_and_the_tokens_stay_right(
    model_path: Path, runners: tuple[ModelRunner, ModelRunner]
) -> None:
    holder, fetcher = runners
    prompt = list(range(3, 90))
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    (expected,) = reference(model, [prompt], [8], "cpu")
    directory = PrefixDirectory()
    theirs, _ = run_requests(holder, [request(prompt, 8)], directory=directory)
    theirs.epoch += 1  # the executor has not heard of it: as if it had been reset on the way
    again = request(prompt, 8, name="again")
    scheduler, _ = run_requests(fetcher, [again], recovery="swap", directory=directory)
    assert again.sequences[0].output_token_ids.tolist() == expected
    assert scheduler.kv.pool.counters.fetch_failed == 10
    assert again.sequences[0].num_preemptions == 1, "tried once, then computed"
    assert theirs.kv.pool.num_remote_pins == 0


# ---- the mechanism by itself -------------------------------------------------------------------------------


class Exchange:
    """Two pools of ``num_blocks`` and the way between them. ``done``: the reports."""

    def __init__(
        self,
        tmp_path: Path,
        holder: Keys | None = None,
        fetcher: Keys | None = None,
        *,
        num_blocks: int = 64,
        head_size: int = 16,
    ) -> None:
        shapes, cpu = [(2, head_size)] * 2, torch.device("cpu")
        self.num_blocks = num_blocks
        self.source, self.target = (KVPool(shapes, num_blocks, 4, torch.float32, cpu) for _ in range(2))
        self.content = np.random.default_rng(1).integers(0, 256, (num_blocks, self.source.bytes_per_block), np.uint8)
        self.source.scatter(np.arange(num_blocks, dtype=np.int32), self.content)
        size, hashes = self.source.bytes_per_block, BlockHashes(num_blocks, 4)
        self.tiers: dict[int, Tier] = {DEVICE: DeviceTier(self.source, hashes)}
        self.server = BlockServer(self.tiers, size, f"ipc://{tmp_path}/blocks", "", holder, begun=lambda: self.begun)
        self.begun = (-1, -1)
        self.links = Peers({}, size, f"ipc://{tmp_path}/fetched", "", fetcher)
        self.copier = BlockCopier(DeviceTier(self.target, hashes))
        self.copier.peers = self.links
        self.done: list[Copied] = []
        self.reported = threading.Event()
        self.copier.report_to(self._report)

    def _report(self, copied: Copied | Found) -> None:
        assert isinstance(copied, Copied)
        self.done.append(copied)
        self.reported.set()

    def fetch(self, blocks: list[int], *, step: int = 1, epoch: int = 7, peer: str = "", key: str = "") -> None:
        pairs = np.array([(block, self.num_blocks - 1 - block) for block in blocks], np.int32)
        remote = RemoteTier(peer or self.server.endpoint, epoch, 3, key)
        self.copier.begin(1, step, [CopyJob(1, step, DEVICE, DEVICE, pairs, remote)])

    def wait(self, seconds: float = 20.0) -> Copied:
        assert self.reported.wait(seconds)
        self.reported.clear()
        return self.done[-1]

    def close(self) -> None:
        self.server.close()
        self.links.close()


@pytest.fixture
def exchange(tmp_path: Path) -> Iterator[Exchange]:
    with contextlib.closing(Exchange(tmp_path)) as exchange:
        yield exchange


def test_blocks_arrive_bit_for_bit_in_many_pieces(exchange: Exchange, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "PIECE_BYTES", 3 * exchange.source.bytes_per_block)
    exchange.begun = (7, 3)
    exchange.fetch(list(range(40)))
    copied = exchange.wait()
    assert (copied.source, copied.target, copied.step, copied.bad) == (DEVICE, DEVICE, 1, b"")
    assert copied.peer == exchange.server.endpoint
    arrived = exchange.target.gather(np.arange(63, 23, -1, dtype=np.int32))
    assert (arrived == exchange.content[:40]).all()


def test_a_peer_answers_when_it_has_begun_the_step(exchange: Exchange) -> None:
    exchange.begun = (7, 2)
    exchange.fetch([1, 2])
    assert not exchange.reported.wait(0.3)
    exchange.begun = (7, 3)
    assert exchange.wait().bad == b""


class Asker:
    """An executor that asks the holder of an exchange, frame by frame."""

    def __init__(self, exchange: Exchange, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.connect(exchange.server.endpoint)

    def ask(self, number: int, *, step: int, block: int = 1) -> None:
        self.socket.send(encode(ReadBlocks(number, 7, step, pack_int32s([0, block]))))

    def answer(self, seconds: float = 20.0) -> tuple[int, str] | None:
        """Number and error of the next answer."""
        if not self.socket.poll(1000 * seconds):
            return None
        answer = decode_from_peer(self.socket.recv_multipart()[0])
        assert isinstance(answer, Blocks)
        return answer.number, answer.error


@pytest.fixture
def askers(exchange: Exchange) -> Iterator[list[Asker]]:
    with zmq.Context() as context:
        askers = [Asker(exchange, context) for _ in range(2)]
        yield askers
        for asker in askers:
            asker.socket.close(linger=0)


def test_who_asks_for_a_step_that_has_not_come_keeps_nobody_else_waiting(
    exchange: Exchange, askers: list[Asker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_server, "_STEP_TIMEOUT", 60.0)
    early, other = askers
    exchange.begun = (7, 3)
    early.ask(1, step=4)
    assert early.answer(0.2) is None
    for number in range(1, 9):
        other.ask(number, step=3)
        assert other.answer() == (number, "")
    early.ask(2, step=3)
    assert early.answer() == (2, ""), "nor itself"
    exchange.begun = (7, 4)
    assert early.answer() == (1, "")


def test_requests_that_wait_for_a_step_are_bounded(
    exchange: Exchange, askers: list[Asker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_server, "_STEP_TIMEOUT", 60.0)
    monkeypatch.setattr(block_server, "_MOST_WAITING", WINDOW + 1)
    exchange.begun = (7, 3)
    one, other = askers
    refused = "too many requests wait for their step"
    for number in range(WINDOW + 1):
        one.ask(number, step=4)
    assert one.answer() == (WINDOW, refused), "its own window is full"
    other.ask(8, step=4)
    other.ask(9, step=4)
    assert other.answer() == (9, refused), "there is no room for more of anybody"
    exchange.begun = (7, 4)
    assert [one.answer() for _ in range(WINDOW)] == [(number, "") for number in range(WINDOW)]
    assert other.answer() == (8, "")
    one.ask(10, step=4)
    assert one.answer() == (10, "")


def test_answers_may_come_in_another_order(exchange: Exchange, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "PIECE_BYTES", exchange.source.bytes_per_block)
    endpoint = f"ipc://{tmp_path}/another"
    with zmq.Context() as context, context.socket(zmq.ROUTER) as peer:
        peer.bind(endpoint)
        exchange.fetch([1, 2, 3], peer=endpoint)
        asked = [peer.recv_multipart() for _ in range(3)]
        for identity, frame in reversed(asked):
            request = decode_from_peer(frame)
            assert isinstance(request, ReadBlocks)
            content = exchange.content[unpack_int32s(request.blocks)[1]].tobytes()
            peer.send_multipart([identity, encode(Blocks(request.number, peers.checksum(content))), content])
        assert exchange.wait().bad == b""
    assert (exchange.target.gather(np.array([62, 61, 60], np.int32)) == exchange.content[1:4]).all()


def test_a_block_larger_than_a_frame_comes_in_several(tmp_path: Path) -> None:
    with contextlib.closing(Exchange(tmp_path, num_blocks=8, head_size=40_000)) as exchange:
        exchange.begun = (7, 3)
        exchange.fetch([0, 1, 2, 3, 4])
        assert exchange.wait().bad == b""
        assert (exchange.target.gather(np.array([7, 6, 5, 4, 3], np.int32)) == exchange.content[:5]).all()
        with zmq.Context() as context, context.socket(zmq.DEALER) as asker:
            asker.connect(exchange.server.endpoint)
            asker.send(encode(ReadBlocks(1, 7, 3, pack_int32s([0, 1]))))
            sizes = [len(frame) for frame in asker.recv_multipart()[1:]]
    last = exchange.source.bytes_per_block - 2 * FRAME_BYTES
    assert 0 < last < FRAME_BYTES
    assert sizes == [FRAME_BYTES, FRAME_BYTES, last]


def test_what_encryption_adds_to_a_full_frame_fits(tmp_path: Path) -> None:
    make_key_pairs(tmp_path, "scheduler", "holder", "fetcher")
    holder, fetcher = (Keys(tmp_path, name) for name in ("holder", "fetcher"))
    with contextlib.closing(Exchange(tmp_path, holder, fetcher, num_blocks=8, head_size=40_000)) as exchange:
        exchange.begun = (7, 3)
        exchange.fetch([0, 1], key=holder.public.decode())
        assert exchange.wait().bad == b""
        assert (exchange.target.gather(np.array([7, 6], np.int32)) == exchange.content[:2]).all()


@pytest.mark.parametrize(("blocks", "epoch"), [([1, 2], 6), ([1, 2], 8), ([1, 64], 7), ([-1], 7)])
def test_what_is_not_there_is_refused(
    exchange: Exchange, blocks: list[int], epoch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_server, "_STEP_TIMEOUT", 0.2)
    exchange.begun = (7, 3)
    exchange.fetch(blocks, epoch=epoch)
    assert sorted(unpack_int32s(exchange.wait().bad)) == sorted(63 - block for block in blocks)
    exchange.fetch([5], step=2)
    assert exchange.wait().bad == b"", "the next one is served"


def test_a_peer_that_is_silent_is_given_up(exchange: Exchange, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_SILENCE_SECONDS", 0.3)
    exchange.fetch([1, 2, 3], peer=f"ipc://{tmp_path}/nobody")
    assert len(unpack_int32s(exchange.wait().bad)) == 3


def test_a_fetch_is_cancelled(exchange: Exchange, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_SILENCE_SECONDS", 60.0)
    peer = f"ipc://{tmp_path}/nobody"
    exchange.fetch([1, 2, 3], peer=peer)
    began = time.monotonic()
    exchange.copier.cancel(CancelCopies(1, 1, peer))
    assert len(unpack_int32s(exchange.wait().bad)) == 3
    assert time.monotonic() - began < 20, "long before the peer would have been given up for its silence"


def test_a_cancelling_may_come_before_its_step(
    exchange: Exchange, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "_SILENCE_SECONDS", 60.0)
    peer = f"ipc://{tmp_path}/nobody"
    exchange.copier.cancel(CancelCopies(1, 2, peer))
    exchange.copier.begin(1, 1, [])
    began = time.monotonic()
    exchange.fetch([1, 2, 3], step=2, peer=peer)
    assert len(unpack_int32s(exchange.wait().bad)) == 3
    assert time.monotonic() - began < 20
    exchange.copier.cancel(CancelCopies(1, 2, peer))
    assert not exchange.copier._unwanted, "of what is over nothing is kept"


def test_nothing_is_written_or_told_after_a_reset(exchange: Exchange, tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/late"
    with zmq.Context() as context, context.socket(zmq.ROUTER) as peer:
        peer.bind(endpoint)
        exchange.fetch([1], peer=endpoint)
        exchange.fetch([4], step=2, peer=endpoint)
        identity, frame = peer.recv_multipart()
        request = decode_from_peer(frame)
        assert isinstance(request, ReadBlocks)
        exchange.copier.reset(2, keep=True)
        content = exchange.content[1].tobytes()
        peer.send_multipart([identity, encode(Blocks(request.number, peers.checksum(content))), content])
        exchange.begun = (7, 3)
        exchange.fetch([5])
        assert exchange.wait().bad == b"", "what begins afterwards is served"
    assert len(exchange.done) == 1
    assert not exchange.target.gather(np.array([62, 59], np.int32)).any()


def test_with_keys_blocks_go_to_executors_of_the_allow_list_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "_SILENCE_SECONDS", 1.0)
    make_key_pairs(tmp_path, "scheduler", "holder", "fetcher", "stranger")
    holder, fetcher, stranger = (Keys(tmp_path, name) for name in ("holder", "fetcher", "stranger"))
    public_file(tmp_path, "stranger").unlink()
    for keys, arrives in ((fetcher, True), (stranger, False), (None, False)):
        with contextlib.closing(Exchange(tmp_path, holder, keys)) as exchange:
            exchange.begun = (7, 3)
            exchange.fetch([1], key=holder.public.decode())
            assert (exchange.wait().bad == b"") == arrives


@pytest.mark.parametrize("spoil", ["content", "length", "number", "frames", "none", "garbage"])
def test_a_peer_that_sends_rubbish_fills_no_block(exchange: Exchange, tmp_path: Path, spoil: str) -> None:
    endpoint = f"ipc://{tmp_path}/liar"
    with zmq.Context() as context, context.socket(zmq.ROUTER) as liar:
        liar.bind(endpoint)
        exchange.fetch([1], peer=endpoint)
        identity, frame = liar.recv_multipart()
        asked = decode_from_peer(frame)
        assert isinstance(asked, ReadBlocks)
        content = bytes(exchange.source.bytes_per_block)
        header = encode(Blocks(asked.number + (spoil == "number"), peers.checksum(content) + (spoil == "content")))
        parts = {"length": [content[:-1]], "frames": [content[:4], content[4:]], "none": []}.get(spoil, [content])
        liar.send_multipart([identity, b"?" if spoil == "garbage" else header, *parts])
        assert unpack_int32s(exchange.wait().bad).tolist() == [62]
        assert not exchange.target.gather(np.array([62], np.int32)).any()
