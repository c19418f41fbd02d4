"""Find private names of dependencies in the product: they change without notice, and are not the same in all versions.

    python .ci/private_names.py [FOLDER ...]

A name is private if it begins with one underscore. It is one of a dependency's where

- a module or a name that is imported has such a part;
- it is an attribute of anything but ``self``, ``cls`` and ``super()``, unless a class or the top of this file defines
  it: another object's private attribute is for the classes of its own file;
- it is an attribute of ``self``, ``cls`` or ``super()`` that no class of the product defines from which this one
  derives, or which derives from this one;
- a class defines it, and a class of a dependency from which it derives has it too;
- it is given as a string, to ``getattr`` and its like, or to an import function.

Documented names that begin with an underscore are no hits, nor are the names in ``ALLOWED``.
"""

import ast
import functools
import importlib
import inspect
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PRODUCT = ("services", "shared", "kernels")

DOCUMENTED = {
    "_replace", "_asdict", "_fields", "_make", "_field_defaults",  # of named tuples
    "_exit",  # of os
    "_fields_", "_pack_",  # of structures of ctypes
}  # fmt: skip


class Allowed(NamedTuple):
    """Why a private name is used, and the versions with which the product was tested.

    ``guard``: the part of the product that refuses other versions when it starts.
    """

    why: str
    tried: str
    guard: str


_PACKING = Allowed(
    "No public function reorders a weight once for oneDNN: in bfloat16 decoding takes up to twice as long without.",
    "torch 2.11, 2.13, 2.14 and 2.15",
    "pagewise_executor.models.packed_linear:TORCH_VERSIONS",
)
ALLOWED = {
    ("packed_linear.py", "torch.ops.mkldnn._reorder_linear_weight"): _PACKING,
    ("packed_linear.py", "torch.ops.mkldnn._linear_pointwise"): _PACKING,
}
"""By file and name."""

_BY_STRING = {"getattr", "hasattr", "setattr", "delattr", "attrgetter", "methodcaller", "import_module", "__import__"}
_OWN = ("self", "cls", "super()")


class Class(NamedTuple):
    """A class of the product: the names of its bases, and the private names that it defines."""

    bases: list[str]
    defines: set[str]


class Hit(NamedTuple):
    """A private name of a dependency."""

    path: Path
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.name} is a private name of a dependency"


def is_private(name: str) -> bool:
    """Whether a name begins with one underscore, and is not documented."""
    return name.startswith("_") and not name.startswith("__") and name != "_" and name not in DOCUMENTED


def has_private_part(dotted: str) -> bool:
    """Whether a part of a dotted name is private."""
    return any(is_private(part) for part in dotted.split("."))


def is_own(module: str | None, level: int = 0) -> bool:
    """Whether a module is the product's."""
    return level > 0 or (module or "").partition(".")[0].startswith("pagewise")


def defined_in(tree: ast.AST) -> set[str]:
    """Return the names that classes and functions of a tree define: methods, fields, slots, attributes of ``self``."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) in _OWN:
            found.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return {name for name in found if is_private(name)}


def classes_in(tree: ast.Module) -> dict[str, Class]:
    """Return the classes of a file by name."""
    return {
        node.name: Class(
            [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases], defined_in(node)
        )
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }


def family(name: str, classes: dict[str, Class]) -> set[str]:
    """Return a class, the classes of the product from which it derives, and all classes that derive from one of
    these."""
    found, before = {name}, 0
    while len(found) > before:
        before = len(found)
        found |= {base for one in found for base in classes[one].bases if base in classes}
    return found | {other for other, one in classes.items() if _derives(other, name, classes) and one}


def _derives(name: str, ancestor: str, classes: dict[str, Class]) -> bool:
    return any(
        base == ancestor or (base in classes and base != name and _derives(base, ancestor, classes))
        for base in classes[name].bases
    )


class Finder(ast.NodeVisitor):
    """Finds the hits in one file. ``classes``: the classes of the whole product, by name."""

    def __init__(self, path: Path, tree: ast.Module, classes: dict[str, Class]) -> None:
        self.hits: list[Hit] = []
        self._path, self._classes = path, classes
        self._in_file = defined_in(tree)
        self._imported: dict[str, str] = {}
        self._known: list[set[str]] = []  # the private names of the classes around a node

    def _hit(self, node: ast.AST, name: str) -> None:
        if (self._path.name, name) not in ALLOWED:
            self.hits.append(Hit(self._path, getattr(node, "lineno", 0), name))

    def visit_Import(self, node: ast.Import) -> None:
        """``import a._b``."""
        for alias in node.names:
            top = alias.name.partition(".")[0]
            self._imported[alias.asname or top] = alias.name if alias.asname else top
            if has_private_part(alias.name) and not is_own(alias.name):
                self._hit(node, alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """``from a._b import c``, ``from a import _b``."""
        for alias in node.names:
            dotted = f"{node.module}.{alias.name}"
            if not is_own(node.module, node.level):
                self._imported[alias.asname or alias.name] = dotted
                if has_private_part(dotted):
                    self._hit(node, dotted)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """A class, which may define a private name of a dependency's class."""
        for base in node.bases:
            for name in sorted(defined_in(node) & self._private_names_of(ast.unparse(base).partition("[")[0])):
                self._hit(node, f"{ast.unparse(base)}.{name}")
        related = family(node.name, self._classes)
        self._known.append(set().union(*(self._classes[one].defines for one in related)))
        self.generic_visit(node)
        self._known.pop()

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """``a._b``."""
        self.generic_visit(node)
        if not is_private(node.attr):
            return
        value = ast.unparse(node.value)
        root = value.partition(".")[0].partition("(")[0]
        if value in _OWN and self._known:
            if node.attr not in self._known[-1]:
                self._hit(node, f"{value}.{node.attr}")
        elif root in self._imported:
            self._hit(node, f"{self._imported[root]}{value[len(root) :]}.{node.attr}")
        elif node.attr not in self._in_file:
            self._hit(node, f"{value}.{node.attr}")

    def visit_Call(self, node: ast.Call) -> None:
        """``getattr(a, "_b")``, ``import_module("a._b")``, ``vars(a)["_b"]`` and so on."""
        self.generic_visit(node)
        called = ast.unparse(node.func).rpartition(".")[2]
        if called in _BY_STRING:
            for text in (each.value for each in node.args if isinstance(each, ast.Constant)):
                if isinstance(text, str) and has_private_part(text) and text not in self._in_file and not is_own(text):
                    self._hit(node, f"{called}({text!r})")

    def visit_Subscript(self, node: ast.Subscript) -> None:
        """``a.__dict__["_b"]``."""
        self.generic_visit(node)
        value = ast.unparse(node.value)
        if value.endswith(".__dict__") or value.startswith("vars("):
            name = node.slice.value if isinstance(node.slice, ast.Constant) else None
            if isinstance(name, str) and is_private(name) and name not in self._in_file:
                self._hit(node, f"{value}[{name!r}]")

    def _private_names_of(self, base: str) -> frozenset[str]:
        root, _, rest = base.partition(".")
        return private_names_of(".".join(filter(None, [self._imported.get(root, ""), rest])))


@functools.cache
def private_names_of(dotted: str) -> frozenset[str]:
    """Return the private names of a dependency's class; none if it is no class, or is not installed."""
    module, _, name = dotted.rpartition(".")
    try:
        cls = getattr(importlib.import_module(module), name) if module else None
    except (ImportError, AttributeError):
        cls = None
    return frozenset(each for each in _names_of(cls) if is_private(each)) if isinstance(cls, type) else frozenset()


def _names_of(cls: type) -> Iterator[str]:
    """Yield the attributes of a class, and the attributes of ``self`` that its methods and its bases' set."""
    yield from dir(cls)
    for one in inspect.getmro(cls):
        if one.__module__ == "typing" or one in (object, type):
            continue
        yield from inspect.get_annotations(one)
        try:
            yield from defined_in(ast.parse(textwrap.dedent(inspect.getsource(one))))
        except (OSError, TypeError, SyntaxError):  # it is not written in Python
            continue


def find(files: Iterable[Path], root: Path) -> list[Hit]:
    """Return the hits in files below ``root``."""
    trees = {path: ast.parse(path.read_text()) for path in sorted(files)}
    classes: dict[str, Class] = {}
    for tree in trees.values():
        for name, one in classes_in(tree).items():
            before = classes.get(name, Class([], set()))  # of the same name in another file
            classes[name] = Class(before.bases + one.bases, before.defines | one.defines)
    hits = []
    for path, tree in trees.items():
        finder = Finder(path.relative_to(root), tree, classes)
        finder.visit(tree)
        hits += finder.hits
    return hits


def main(arguments: list[str]) -> int:
    """Print the hits; returns the exit code."""
    folders = [Path(each).resolve() for each in arguments] or [ROOT / each for each in PRODUCT]
    root = ROOT if not arguments else Path("/")
    hits = find((path for folder in folders for path in folder.rglob("*.py")), root)
    for hit in hits:
        print(hit)
    if hits:
        print("Use what is public, or list the name in .ci/private_names.py with a reason, versions, and their guard.")
    return 1 if hits else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
