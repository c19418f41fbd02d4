"""Which names of other packages a source file takes, found in its syntax tree."""

import ast
import functools
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Name(NamedTuple):
    """A name of a package as the source has it, such as ``torch.cuda.Stream``, with its place."""

    dotted: str
    line: int


def taken_names(path: Path, packages: tuple[str, ...]) -> Iterator[Name]:
    """Yield the names that a file imports from ``packages``, or reaches through names that it imports from them.

    A chain of attributes that begins with an imported name counts as a whole: of ``tl.extra.cuda.gdc_wait()`` it is
    ``triton.language.extra.cuda.gdc_wait``. Attributes of the result of a call cannot be followed.
    """
    tree = _tree(path)
    imported: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in packages:
                    yield Name(alias.name, node.lineno)
                    imported[alias.asname or alias.name.split(".")[0]] = (
                        alias.name if alias.asname else alias.name.split(".")[0]
                    )
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in packages:
            for alias in node.names:
                dotted = f"{node.module}.{alias.name}"
                yield Name(dotted, node.lineno)
                imported[alias.asname or alias.name] = dotted
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (chain := _chain(node)) and chain[0] in imported:
            yield Name(".".join([imported[chain[0]], *chain[1:]]), node.lineno)


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _chain(node: ast.expr) -> list[str]:
    """Return the names of a chain of attributes, the first one first; nothing if it begins with another expression."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *reversed(names)] if isinstance(node, ast.Name) else []


def exists(dotted: str) -> bool:
    """Whether the modules and objects that are installed have this name."""
    parts = dotted.split(".")
    found: object = None
    for number, part in enumerate(parts):
        if number and hasattr(found, part):
            found = getattr(found, part)
            continue
        try:
            found = importlib.import_module(".".join(parts[: number + 1]))
        except ImportError:
            return False
    return True
