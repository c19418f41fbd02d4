"""The look of a figure of matplotlib: its drawn texts, and whether one is drawn over another."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import combinations
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

_SLACK = 1.0
"""Pixels by which two texts may overlap: their boxes have some room around the letters."""


def drawn_texts(figure: Figure) -> list[tuple[str, Any]]:
    """Draw a figure; return each text that comes onto it, with its box in pixels."""
    found: dict[int, tuple[str, Any]] = {}
    draw = Text.draw

    def record(text: Text, renderer: Any, *arguments: Any, **more: Any) -> None:
        if text.get_visible() and text.get_text().strip():
            found[id(text)] = text.get_text(), text.get_window_extent(renderer)
        draw(text, renderer, *arguments, **more)

    with pytest.MonkeyPatch.context() as patch:  # ticks that are out of sight are not drawn
        patch.setattr(Text, "draw", record)
        FigureCanvasAgg(figure).draw()  # one that was closed has no canvas any more
    return list(found.values())


def overlapping(figure: Figure) -> list[tuple[str, str]]:
    """The pairs of texts of which one covers the other, and texts that the figure cuts off, with an empty one."""
    texts, whole = drawn_texts(figure), figure.bbox
    assert texts, "nothing is drawn"
    cut = [
        (text, "")
        for text, box in texts
        if box.x0 < whole.x0 - _SLACK or box.y0 < whole.y0 - _SLACK
        or box.x1 > whole.x1 + _SLACK or box.y1 > whole.y1 + _SLACK
    ]  # fmt: skip
    return cut + [
        (one, other)
        for (one, a), (other, b) in combinations(texts, 2)
        if min(a.x1, b.x1) - max(a.x0, b.x0) > _SLACK and min(a.y1, b.y1) - max(a.y0, b.y0) > _SLACK
    ]


@contextmanager
def saved_figures() -> Iterator[list[Figure]]:
    """Collects the figures that are saved meanwhile, before the code that has drawn them closes them."""
    found: list[Figure] = []
    save: Callable[..., None] = Figure.savefig

    def keep(figure: Figure, *arguments: Any, **more: Any) -> None:
        save(figure, *arguments, **more)
        found.append(figure)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", keep)
        yield found
