"""For all tests: how kernels and CPU threads run. Each folder has its own builders and fakes.

With a GPU the kernels run there, so tests that take the ``device`` count as ``gpu`` tests, and tests that need the
interpreter, marked ``interpreted``, are skipped.
"""

import gc
import logging
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from pagewise_shared.cpu_threads import wait_variables

# As executors do, before torch is imported. Otherwise tests that run beside others take several times as long.
os.environ.update(wait_variables(os.environ))

import torch

if not torch.cuda.is_available():
    # In Triton's interpreter; it has to be known before anything imports Triton.
    os.environ["TRITON_INTERPRET"] = "1"


# The time of an example depends more on other work of the machine than on the example.
hypothesis.settings.register_profile("pagewise", deadline=None)
hypothesis.settings.load_profile("pagewise")


PROCESSES = {"abuse", "agents", "benchmarks", "chaos", "cli", "compose", "e2e", "fuzz"}
"""Folders whose tests start processes and wait for them. The others compute in the process of pytest."""


@pytest.hookimpl(tryfirst=True)  # before -m looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that run on the GPU, if there is one, and put files in an order in which several workers run
    them."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        interleave(items)
    if not torch.cuda.is_available():
        return
    for item in items:
        if "device" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.gpu)
        elif item.get_closest_marker("interpreted"):
            item.add_marker(pytest.mark.skip(reason="kernels are interpreted only where there is no GPU"))


def interleave(items: list[pytest.Item]) -> None:
    """Spread the files of either kind evenly: while workers wait for processes, another one computes.

    Files that start many processes seldom all run at once then, and the last files are not the longest.
    """
    files = list(dict.fromkeys(item.path for item in items))
    kinds = {path: path.relative_to(Path(__file__).parent).parts[0] in PROCESSES for path in files}
    totals, seen = Counter(kinds.values()), Counter[bool]()
    places = {}
    for path in files:
        places[path] = (seen[kinds[path]] + 0.5) / totals[kinds[path]]
        seen[kinds[path]] += 1
    items.sort(key=lambda item: (places[item.path], str(item.path)))


def pytest_collection_finish() -> None:
    """Keep imported objects, a million, out of the garbage collector, which many tests run."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def device() -> torch.device:
    """Where kernels run: a GPU if there is one, named as the loader names it."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Commands that a test runs in this process set up logging, to a stream that is the test's own: later ones would
    write to it after it was closed."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield
    for handler in list(root.handlers):
        if handler not in before and type(handler).__module__ != "_pytest.logging":
            root.removeHandler(handler)
    root.setLevel(level)
