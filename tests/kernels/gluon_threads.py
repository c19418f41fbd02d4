"""Runs kernels in Gluon, which has no interpreter, on threads: one for each partition of warps of a program.

The module of a kernel is imported anew, with this module in the place of Gluon's. Operations that a device may do late
or early happen at the worst moment: a copy destroys its target when it begins, and brings values only when a thread
waits for them; a product reads shared memory only when it is waited for. So a buffer that is filled before all have
read it, or read before it is filled, makes results NaN. A wait that never ends raises ``DeadlockError``.
"""

import importlib.util
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pagewise_kernels.attention  # noqa: F401  # its package is imported with the real Triton
import torch

_SECONDS = 60.0
_here = threading.local()
_GLUON = "triton.experimental.gluon"


class DeadlockError(Exception):
    """A barrier was waited for longer than any arrival can take."""


class Pointer:
    """Elements of a flat tensor, at one or many places."""

    def __init__(self, flat: torch.Tensor, at: Any = 0) -> None:
        self.flat, self.at = flat, at
        self.dtype = SimpleNamespace(element_ty=flat.dtype)

    def __add__(self, offsets: Any) -> "Pointer":
        return Pointer(self.flat, self.at + offsets)


class Barrier:
    """Flips its phase after ``count`` arrivals. Copies arrive when a thread waits for the barrier, and not before."""

    def __init__(self) -> None:
        self.count = self.missing = self.phase = 0
        self.copying: list[Callable[[], None]] = []
        self.changed = threading.Condition()

    def arrive(self, count: int) -> None:
        with self.changed:
            self.missing -= count
            assert self.missing >= 0, "more arrivals than the barrier was made for"
            if self.missing == 0:
                self.missing, self.phase = self.count, self.phase + 1
            self.changed.notify_all()

    def arrive_with(self, copy: Callable[[], None]) -> None:
        with self.changed:
            self.copying.append(copy)
            self.changed.notify_all()

    def wait(self, parity: int) -> None:
        until = time.monotonic() + _SECONDS
        with self.changed:
            while self.phase % 2 == parity:
                if self.copying:
                    self.copying.pop(0)()
                    self.arrive(128)
                elif not self.changed.wait(until - time.monotonic()):
                    raise DeadlockError("a barrier was waited for in vain")


class Shared:
    """Shared memory: a view of a tensor."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory

    def index(self, i: Any) -> Any:
        return Shared(self.memory[int(i)])

    def permute(self, order: tuple[int, ...]) -> "Shared":
        return Shared(self.memory.permute(order))

    def reshape(self, shape: list[int]) -> "Shared":
        return Shared(self.memory.view(shape))

    def store(self, values: torch.Tensor) -> None:
        self.memory.copy_(values)
        _here.fenced = False


class Barriers(list[Barrier]):
    def index(self, i: Any) -> Barrier:  # type: ignore[override]
        return self[int(i)]


class Product:
    """A product that has been issued. Its operands in shared memory are read when it is computed."""

    def __init__(self, a: Any, b: Shared, acc: torch.Tensor) -> None:
        self.operands, self.result = (a, b, acc), None

    def compute(self) -> torch.Tensor:
        a, b, acc = self.operands
        a = a.memory if isinstance(a, Shared) else a
        self.result = acc + a.float() @ b.memory.float()
        return self.result


def _load(pointer: Pointer, mask: Any = None, other: Any = None) -> torch.Tensor:
    at = torch.as_tensor(pointer.at)
    if mask is None:
        return pointer.flat[at.long()]
    mask = mask.expand(at.shape)
    return torch.where(mask, pointer.flat[torch.where(mask, at, 0).long()], other)


def _store(pointer: Pointer, values: torch.Tensor, mask: torch.Tensor) -> None:
    mask = mask.expand(values.shape)
    pointer.flat[pointer.at[mask].long()] = values[mask]


def _copy(tile: Shared, pointer: Pointer, mask: torch.Tensor) -> None:
    tile.memory.fill_(float("nan"))
    _here.copies.append((tile, pointer, mask))


def _arrive_with_copies(barrier: Barrier, increment_count: bool) -> None:
    assert not increment_count
    copies, _here.copies = _here.copies, []

    def bring() -> None:
        for tile, pointer, mask in copies:
            tile.memory.copy_(_load(pointer, mask, 0.0))

    barrier.arrive_with(bring)


def _wait(barrier: Barrier, phase: Any, pred: Any = True) -> None:
    time.sleep(random.random() * 0.001)  # in many orders
    if pred:
        barrier.wait(int(phase))
        _here.fenced = False


def _product(a: Any, b: Shared, acc: torch.Tensor, *, use_acc: bool = True, is_async: bool = False) -> Any:
    assert _here.fenced, "the tensor cores need a fence to see what ordinary copies have written"
    issued = Product(a, b, acc if use_acc else torch.zeros_like(acc))
    _here.products.append(issued)
    return issued if is_async else _wait_for_products(0, [issued])


def _wait_for_products(outstanding: int, deps: list[Any]) -> Any:
    while len(_here.products) > outstanding:
        _here.products.pop(0).compute()
    found = [dep.result if isinstance(dep, Product) else dep for dep in deps]
    assert all(value is not None for value in found), "a product is used before it is waited for"
    return found[0] if len(found) == 1 else tuple(found)


def _fence() -> None:
    _here.fenced = True


def _allocate(dtype: Any, shape: list[int], _layout: Any) -> Any:
    if shape[-1] == 1:
        return Barriers(Barrier() for _ in range(shape[0]))
    return Shared(torch.full(shape, float("nan"), dtype=dtype))


def _init(barrier: Barrier, count: int) -> None:
    barrier.count = barrier.missing = count


def _specialise(partitions: list[tuple[Callable[..., None], tuple[Any, ...]]], *_: object) -> None:
    program, errors = (_here.program, _here.programs), list[BaseException]()

    def run(function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        _here.program, _here.programs = program
        _here.copies, _here.products, _here.fenced = [], [], False
        try:
            function(*arguments)
            assert not _here.products, "a product was never waited for"
        except BaseException as error:  # raised below, in the thread of the test
            errors.append(error)

    threads = [threading.Thread(target=run, args=partition) for partition in partitions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _layout(*_: object, **__: object) -> None:
    """Where the elements of a tensor lie: of no meaning here."""


def _modules() -> dict[str, ModuleType]:
    def module(name: str, **names: Any) -> ModuleType:
        made = ModuleType(name)
        made.__dict__.update(names)
        return made

    mbarrier = SimpleNamespace(
        MBarrierLayout=_layout, init=_init, wait=_wait, arrive=lambda barrier, count: barrier.arrive(count)
    )
    async_copy = SimpleNamespace(async_copy_global_to_shared=_copy, mbarrier_arrive=_arrive_with_copies)
    language = module(
        f"{_GLUON}.language",
        constexpr=lambda value: value, int64=torch.int64, float32=torch.float32,
        BlockedLayout=_layout, SliceLayout=_layout, NVMMADistributedLayout=_layout, DotOperandLayout=_layout,
        NVMMASharedLayout=_layout, allocate_shared_memory=_allocate, warp_specialize=_specialise,
        program_id=lambda _: _here.program, num_programs=lambda _: _here.programs,
        load=_load, store=_store, arange=lambda begin, end, _: torch.arange(begin, end),
        full=lambda shape, value, dtype, _: torch.full(shape, value, dtype=dtype),
        expand_dims=torch.unsqueeze, broadcast=lambda a, b: torch.broadcast_tensors(a, b),
        convert_layout=lambda value, _: value, static_range=range, maximum=torch.maximum, max=torch.amax,
        sum=torch.sum, exp2=torch.exp2, where=lambda c, a, b: torch.where(c, a, torch.tensor(b)),
    )  # fmt: skip
    hopper = module(
        f"{_GLUON}.language.nvidia.hopper",
        async_copy=async_copy, fence_async_shared=_fence, mbarrier=mbarrier, warpgroup_mma=_product,
        warpgroup_mma_wait=lambda num_outstanding, deps: _wait_for_products(num_outstanding, deps),
    )  # fmt: skip
    gluon = module(_GLUON, jit=lambda function: function, language=language)
    nvidia = module(f"{_GLUON}.language.nvidia", hopper=hopper)
    experimental = module("triton.experimental", gluon=gluon)
    return {made.__name__: made for made in (experimental, gluon, language, nvidia, hopper)}


@contextmanager
def on_threads(name: str, change: tuple[str, str] | None = None) -> Iterator[ModuleType]:
    """The module ``name`` of kernels, which ``launch`` runs. ``change``: a piece of source, and its replacement."""
    found = importlib.util.find_spec(name)
    assert found is not None
    assert found.origin is not None
    with open(found.origin) as file:
        source = file.read()
    if change is not None:
        assert source.count(change[0]) == 1, "the change would not hit one place"
        source = source.replace(*change)
    made = ModuleType(name)
    with mock.patch.dict(sys.modules, _modules()):
        exec(compile(source, found.origin, "exec"), made.__dict__)
        yield made


def launch(kernel: Callable[..., None], programs: int, *arguments: Any, **constants: Any) -> None:
    """Run ``programs`` programs one after the other. Tensors among the arguments are seen as pointers."""

    def flat(tensor: torch.Tensor) -> torch.Tensor:
        size = tensor.untyped_storage().nbytes() // tensor.itemsize - tensor.storage_offset()
        return tensor.as_strided((size,), (1,))

    pointers = [Pointer(flat(a)) if isinstance(a, torch.Tensor) else a for a in arguments]
    for program in range(programs):
        _here.program, _here.programs = program, programs
        kernel(*pointers, **constants)
