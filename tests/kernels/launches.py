"""Launches a small kernel by Triton and by handles, and compares the calls of the driver. A process of its own runs it:

    python -m tests.kernels.launches

Elsewhere in the tests kernels are interpreted, which cannot be changed once Triton has been imported.
"""

import logging
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
import triton.language as tl
from pagewise_kernels import handles as handles_module
from pagewise_kernels import launch as launching
from pagewise_kernels.attention import Chunk, PrefillPlan
from pagewise_kernels.attention.specialised import SPECIALISED, specialised_prefill_attention
from pagewise_kernels.block_copy import copy_blocks
from pagewise_kernels.handles import Handles
from pagewise_kernels.kv_layer import KVLayer
from pagewise_kernels.launch import pretend_gpu
from pagewise_kernels.rms_norm import rms_norm

from benchmarks.launch.fake_driver import FakeDriver, Launch, fake_driver, missing
from tests.kernels.decode_steps import DecodeSteps


@triton.jit(do_not_specialize=["count"])
def probe_kernel(source, target, count, stride, factor, SIZE: tl.constexpr, NAME: tl.constexpr):  # noqa: N803
    """Multiply; its arguments are one of each type."""
    at = tl.arange(0, SIZE)
    values = tl.load(source + at, mask=at < count, other=0.0) * factor
    tl.store(target + at * stride, values.to(target.dtype.element_ty))


def run(driver: FakeDriver, arguments: tuple[Any, ...], grid: tuple[int, ...] = (3,), **options: object) -> Launch:
    """The driver's arguments of Triton's launch, and of the first, second and third by a handle."""
    options = {"SIZE": 16, "NAME": "a", "num_warps": 1, "enable_fp_fusion": True} | options
    handles = Handles()
    with driver.recorded() as recorded:
        probe_kernel[grid](*arguments, **options)
        for _ in range(3):
            handles.launch(probe_kernel, grid, arguments, options)
        HANDLES.launch(probe_kernel, grid, arguments, options)
        HANDLES.launch(probe_kernel, grid, arguments, options)
    assert len(recorded) == 6
    assert set(recorded) == {recorded[0]}, recorded
    assert handles.num_unfrozen == 0
    return recorded[0]


HANDLES = Handles()
"""Keeps the kinds of all launches of this process, which must not be confused."""


def check_kinds(driver: FakeDriver) -> None:
    """Arguments that Triton distinguishes are launched with the kernel that was compiled for them."""
    floats, halves = torch.zeros(64), torch.zeros(64, dtype=torch.bfloat16)
    base = run(driver, (floats, floats, 5, 4, 0.5))
    assert run(driver, (floats, floats, 0, 4, 0.5)).function == base.function
    same = [(floats, floats, 7, 4, 2.5), (floats[4:], floats, 5, 6, 0.5), (floats, floats, 1, 4, 0.5),
            (floats, floats, 32, 4, 0.5)]  # fmt: skip
    for arguments in same:
        assert run(driver, arguments).function == base.function
    others = [
        run(driver, (floats[1:], floats, 5, 4, 0.5)),  # aligned no more
        run(driver, (floats, floats[3:], 5, 4, 0.5)),
        run(driver, (halves, floats, 5, 4, 0.5)),
        run(driver, (floats, floats, 5, 1, 0.5)),
        run(driver, (floats, floats, 5, 48, 0.5)),
        run(driver, (floats, floats, 5, 2**31, 0.5)),
        run(driver, (floats, floats, 5, 2**31 + 4, 0.5)),
        run(driver, (floats, floats, 2**40 + 5, 4, 0.5)),
        run(driver, (floats, floats, 5, 4, 0.5), SIZE=32),
        run(driver, (floats, floats, 5, 4, 0.5), num_warps=2),
    ]
    others += [run(driver, (floats, floats, count, 4, 0.5)) for count in (False, 5.0)]  # equal to integers
    assert len({base.function, *(one.function for one in others)}) == 1 + len(others)
    assert run(driver, (floats, floats, 5, 4, 0.5), (3, 4, 5)).grid == (3, 4, 5)
    assert run(driver, (floats, floats, -5, -4, 0.5)).values[2:4] == (2**32 - 5, 2**32 - 4)
    driver.stream = 11
    assert run(driver, (floats, floats, 5, 4, 0.5)).stream == 11


def check_dependent_launches(driver: FakeDriver) -> None:
    """The kernels of decode steps begin early where the device can and it is not forbidden; others never do."""
    floats = torch.zeros(64)
    assert not run(driver, (floats, floats, 5, 4, 0.5)).dependent
    assert run(driver, (floats, floats, 5, 4, 0.5), launch_pdl=True).dependent
    launching.use_handles(True)
    decoder = DecodeSteps(torch.device("cpu"), real=False, most_steps=8, multiply=_make_empty)
    for _ in range(2):  # through Triton, and by handles
        with driver.recorded() as recorded:
            decoder.step()
        assert all(launch.dependent for launch in recorded), recorded
        assert len({launch.kernel for launch in recorded}) == 10, "each kernel of a decode step"
    x, dependent = torch.zeros(3, 64), []
    for capability, wanted in ((90, True), (90, False), (80, True)):
        pretend_gpu(capability)
        launching.use_dependent_launch(wanted)
        with driver.recorded() as recorded:
            rms_norm(x, x[0], 1e-6)
            rms_norm(x, x[0], 1e-6)
        dependent.append([launch.dependent for launch in recorded])
    assert dependent == [[True] * 2, [False] * 2, [False] * 2]
    pretend_gpu(90)
    launching.use_dependent_launch(True)
    with driver.recorded() as recorded:
        copy_blocks(torch.zeros(1, 2, 16), torch.tensor([[0, 1]]))
    assert not recorded[0].dependent, "it does not wait"
    assert launching.num_unfrozen_launches() == 0


def _make_empty(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The result of a device library's product, empty."""
    return x.new_zeros(len(x), len(weight))


def check_specialised_warps(driver: FakeDriver) -> None:
    """All partitions of warps are launched: two consumers and a producer. With fewer, barriers wait for ever."""
    q, pool = torch.zeros(300, 32, 128, dtype=torch.bfloat16), torch.zeros(40, 16, 8, 128, dtype=torch.bfloat16)
    plan = PrefillPlan(
        [Chunk(0, 0, 300, 0)], heads=32, kv_heads=8, head_dim=128, kv_dtype=q.dtype, device=q.device, config=SPECIALISED
    )
    out, tables = torch.empty_like(q), torch.zeros(1, 40, dtype=torch.int32)
    with driver.recorded() as recorded:
        for _ in range(3):  # through Triton, and by handles
            specialised_prefill_attention(q, KVLayer(pool, pool), tables, plan, out=out)
    assert set(recorded) == {recorded[0]}
    assert len(recorded) == 3
    assert recorded[0].threads == 3 * 128
    assert recorded[0].grid == (-(-300 // 32) * 8, 1, 1)
    assert launching.num_unfrozen_launches() == 0


def check_hooks(driver: FakeDriver) -> None:
    """Launch hooks are called as long as they are set."""
    told: list[object] = []
    floats = torch.zeros(64)
    runtime, options = triton.knobs.runtime, {"SIZE": 16, "NAME": "a", "num_warps": 1, "enable_fp_fusion": True}

    def hook(metadata: Any) -> None:
        told.append(metadata.get()["name"])

    def launch() -> None:
        HANDLES.launch(probe_kernel, (1,), (floats, floats, 5, 4, 0.5), options)

    launch()
    for chain in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        chain.add(hook)
        launch()
        chain.remove(hook)
        launch()
    assert told == ["probe_kernel"] * 2
    assert HANDLES.num_unfrozen == 0


class _Watching(logging.Handler):
    """Keeps the log of the handles."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append(record.getMessage())


def check_unexpected(driver: FakeDriver) -> None:
    """Triton launches kernels that handles cannot launch; this is logged once, and all are counted."""
    floats = torch.zeros(64)
    watching = _Watching()
    logging.getLogger("pagewise_kernels.handles").addHandler(watching)
    options = {"NAME": "a", "num_warps": 1, "enable_fp_fusion": True}
    handles = Handles()
    with driver.recorded() as recorded:
        for _ in range(3):
            handles.launch(probe_kernel, (1,), (floats, floats, 5, 4, 0.5, 16), options)  # a constant by its place
    assert len(recorded) == 3
    assert handles.num_unfrozen == 3
    handles = Handles()
    with driver.recorded() as recorded:
        for size in (16, [16]):
            with suppress(Exception):  # Triton takes no list either
                handles.launch(probe_kernel, (1,), (floats, floats, 5, 4, 0.5), options | {"SIZE": size})
    assert handles.num_unfrozen == 1
    assert len(watching.told) == 2
    assert "probe_kernel" in watching.told[0]
    handles = Handles()
    with mock.patch.object(handles_module, "_VERSION", "3.10"), driver.recorded() as recorded:
        for _ in range(3):
            handles.launch(probe_kernel, (1,), (floats, floats, 5, 4, 0.5), options | {"SIZE": 16})
    assert len(recorded) == 3
    assert handles.num_unfrozen == 3
    assert ["3.6 to 3.9, not 3.10" in told for told in watching.told] == [False, False, True]
    launching.use_handles(True)
    with driver.recorded() as recorded:
        for _ in range(2):
            launching.launch(probe_kernel, (2,), floats, floats, 5, 4, 0.5, SIZE=16, NAME="a", num_warps=1)
        launching.launch(probe_kernel, (0,), floats, floats, 5, 4, 0.5, SIZE=16, NAME="a", num_warps=1)
    assert len(recorded) == 2
    assert launching.num_unfrozen_launches() == 0


def main() -> None:
    if reason := missing():
        print("skipped:", reason)
        return
    with tempfile.TemporaryDirectory() as folder, fake_driver(Path(folder)) as driver:
        check_kinds(driver)
        check_dependent_launches(driver)
        check_specialised_warps(driver)
        check_hooks(driver)
        check_unexpected(driver)
    print("checked")


if __name__ == "__main__":
    main()
