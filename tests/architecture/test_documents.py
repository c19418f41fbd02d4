"""References in documents exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(path for folder in ("docs", "deploy", "examples") for path in (ROOT / folder).rglob("*.md"))]
)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if not target.startswith(("http://", "https://", "#", "mailto:")):
            assert (document.parent / target.split("#")[0]).exists(), f"{document.name} links to {target}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_make_targets_that_are_named_exist(document: Path) -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for name in re.findall(r"`make ([a-z0-9-]+)", document.read_text()):
        assert name in targets, f"{document.name} names make {name}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_paths_that_are_named_exist(document: Path) -> None:
    for name in re.findall(
        r"`((?:shared|services|kernels|tests|benchmarks|examples|docs|deploy)/[\w./-]+)`", document.read_text()
    ):
        assert (ROOT / name).exists(), f"{document.name} names {name}"


def test_failures_are_listed_once() -> None:
    """A second table of failures would sooner or later contradict the first."""
    heading = re.compile(r"^\| *what *\| *noticed by *\|", re.MULTILINE)
    tables = [document.name for document in DOCUMENTS for _ in heading.findall(document.read_text())]
    assert tables == ["operations.md"]
