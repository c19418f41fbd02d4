"""Large results of the CPU operations lie in memory that was used before, and only there."""

import threading
from pathlib import Path

import torch
from pagewise_kernels.cpu.library import empty, free_unused
from pagewise_kernels.cpu.operations import rms_norm

from tests.cpu_kernels import need_cpu_kernels

SHAPE = (700, 520)  # 1.4 MB


def test_a_large_result_takes_the_place_of_one_that_is_gone() -> None:
    first = empty(SHAPE, torch.float32)
    place = first.data_ptr()
    assert first.is_contiguous()
    assert place % 64 == 0
    del first
    second = empty((350, 1000), torch.float32)
    assert second.data_ptr() == place
    assert second.shape == (350, 1000)
    del second
    assert empty((700, 1000), torch.bfloat16).data_ptr() == place


def test_no_result_lies_where_a_view_is_left() -> None:
    views = [empty(SHAPE, torch.float32)[i].fill_(i) for i in range(4)]
    empty(SHAPE, torch.float32).fill_(-1)
    for i, view in enumerate(views):
        assert bool((view == i).all())


def test_memory_that_nothing_has_lain_in_for_a_while_is_freed() -> None:
    shape = (3000, 9000)  # 108 MB

    def resident() -> float:
        pages = Path("/proc/self/status").read_text()
        return int(pages.split("RssAnon:")[1].split()[0]) / 1024

    free_unused()
    two = [empty(shape, torch.float32).fill_(1) for _ in range(2)]
    two.clear()
    full = resident()
    free_unused()
    place = empty(shape, torch.float32).fill_(1).data_ptr()
    assert resident() > full - 20, "both were in use since the call before"
    free_unused()
    assert resident() < full - 80, "one has not been since"
    assert empty(shape, torch.float32).data_ptr() == place, "the other one has"
    free_unused()
    free_unused()
    assert resident() < full - 180


def test_many_threads_get_memory_of_their_own() -> None:
    wrong = []

    def work(number: int) -> None:
        for _ in range(300):
            mine = empty(SHAPE, torch.float32)
            mine[0].fill_(number)
            wrong.extend(mine[0][mine[0] != number].tolist())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_operations_use_it() -> None:
    need_cpu_kernels()
    x, weight = torch.randn(SHAPE), torch.ones(SHAPE[1])
    place = rms_norm(x, weight, 1e-5).data_ptr()
    assert rms_norm(x, weight, 1e-5).data_ptr() == place
