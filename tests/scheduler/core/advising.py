"""Clients that send turns of sessions and advice to a scheduler, whose executor checks every read and write."""

from itertools import takewhile
from typing import Any

from pagewise_scheduler.core.features.advice import Advice, Outcome
from pagewise_scheduler.core.memory.prefix_tree import CachedBlock, block_keys, hash_chain
from pagewise_scheduler.core.requests.request import Request
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_shared.block_hash import BlockHash, unpack_names
from pagewise_shared.protocol import Advise, DropStored, Found, LookUp, Message, ReuseHints, pack_int32s

from tests.core_requests import change
from tests.scheduler.core.arenas import create
from tests.scheduler.core.builders import create_request, create_scheduler
from tests.scheduler.core.checking_executor import CheckingExecutor
from tests.scheduler.core.driving import executor_for


class Clients:
    """Sends turns of sessions, and advice, at a time that tests set."""

    def __init__(self, **options: Any) -> None:
        make = create if "windows" in options else create_scheduler
        self.scheduler: Scheduler = make(eviction="cost", **options)
        self.executor: CheckingExecutor = executor_for(self.scheduler)
        self.now = 0.0

    @property
    def advice(self) -> Advice:
        return self.scheduler.features.advice

    def turn(self, prompt: list[int], session: str = "", key: str = "", **hints: Any) -> Request:
        request = create_request(prompt, 1, arrival_time=self.now)
        change(request, key=key, reuse=ReuseHints(session=session, **hints))
        self.scheduler.add(request)
        self.settle()
        return request

    def settle(self) -> None:
        """Run until nothing is left to do now."""
        copied = True
        while (plan := self.scheduler.schedule(self.now)) is not None or copied:
            if plan is not None:
                self.scheduler.update(self.executor.execute(plan))
            for message in self.scheduler.features.messages(self.now):
                if isinstance(message, LookUp):
                    self.scheduler.features.take(self.found(message), self.now)
                else:
                    self.drop(message)
            copied = bool(reports := self.executor.finish_copies())
            for report in reports:
                self.scheduler.copied(report)

    def found(self, question: LookUp) -> Found:
        """The answer of the executor, which has a disk."""
        names = hash_chain(BlockHash(question.root), question.tokens, 4 * self.scheduler.kv.block_size)
        count = sum(1 for _ in takewhile(lambda name: name in self.executor.storage, names))
        return Found(question.epoch, question.number, count)

    def drop(self, message: Message) -> None:
        """Delete blocks of the disk as a message says."""
        assert isinstance(message, DropStored)
        for name in unpack_names(message.names):
            self.executor.storage.pop(name.hash, None)

    def advise(self, kind: Any, session: str = "", key: str = "", **fields: Any) -> Outcome:
        return self.advice.advise(Advise(1, 1, kind, key=key, session=session, **fields), self.now)

    def path(self, prompt: list[int]) -> list[CachedBlock]:
        tree, size = self.scheduler.kv.pool.tree, self.scheduler.kv.block_size
        return tree.walk(tree.root_of(None), block_keys(pack_int32s(prompt), size))


def prompt(first: int, length: int = 16) -> list[int]:
    """Tokens that no prompt with another number shares, but for long ones."""
    return [first * 100 + i for i in range(length)]
