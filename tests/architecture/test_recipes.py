"""The recipes of CONTRIBUTING.md work: a toy change that follows each applies to this tree, and its tests pass."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECTIONS = dict(
    re.findall(r"^### ([^\n]+)\n(.*?)(?=^##|\Z)", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE | re.DOTALL)
)
RECIPES = {title: section for title, section in SECTIONS.items() if "docs/recipes/" in section}
DIFFS = sorted(ROOT.glob("docs/recipes/*.diff"))
COPIED = (
    "shared",
    "kernels",
    "services",
    "tests",
    "docs",
    "pyproject.toml",
    "compose.yaml",
    "CONTRIBUTING.md",
    "SECURITY.md",
)
ROOMS = ("", "shared", "kernels", "services/scheduler", "services/gateway", "services/executor", "services/cli")

OPERATIONS = "tests/architecture/test_operations.py"
NODES = {
    "option": ["tests/gateway/http/test_parameters.py::test_toy_most_tokens_of_one_output", OPERATIONS],
    "metric": ["tests/gateway/http/test_parameters.py::test_toy_tokenized_counts_answers", OPERATIONS],
    "endpoint": ["tests/gateway/http/test_parameters.py::test_toy_greets_and_is_in_the_document"],
    "sampling-parameter": [
        "tests/gateway/http/test_parameters.py::test_toy_max_token_id_arrives",
        "tests/executor/sampling/test_sampler.py::test_toy_max_token_id_of_one_row_alone",
    ],
    "eviction-policy": [
        "tests/scheduler/core/test_prefix_cache.py::test_toy_mru_keeps_what_was_used_first",
        OPERATIONS,
    ],
    "feature": ["tests/scheduler/core/test_toy_one_at_a_time.py"],
    "model-family": ["tests/executor/models/test_toy_family.py"],
    "model-quirk": ["tests/executor/models/test_loader.py::test_toy_a_state_beside_the_kv_is_refused"],
    "attention-backend": ["tests/executor/attention/test_toy_attention.py", OPERATIONS],
    "tier": ["tests/executor/tiers/test_toy_bucket.py", OPERATIONS],
}
"""The tests that run in the changed tree: the tests that the diff adds, and the tests of its documents."""


def touched(diff: Path) -> list[tuple[str, bool]]:
    """The files that a diff touches, and whether it adds them."""
    files = re.findall(r"^--- (\S+)\n\+\+\+ b/(\S+)$", diff.read_text(), re.MULTILINE)
    return [(name, before == "/dev/null") for before, name in files]


def run(tree: Path, *command: str) -> None:
    """Run a command in ``tree``, which is imported instead of this one."""
    paths = os.pathsep.join(str(tree / room) for room in ROOMS)
    # Without the ceiling, git would take the files of a repository around the temporary folder for its own.
    environment = os.environ | {"PYTHONPATH": paths, "GIT_CEILING_DIRECTORIES": str(tree.parent)}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the files that a recipe may touch or its tests may need, in their present state, committed or not."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *COPIED]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    copy = tmp_path / "tree"
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            target = copy / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    return copy


ALL = [pytest.param(diff, id=diff.stem) for diff in DIFFS]
TRIED = [
    pytest.param(diff, id=diff.stem, marks=[] if diff.stem == "tier" else pytest.mark.long)  # it touches the most
    for diff in DIFFS
]


@pytest.mark.parametrize("diff", ALL)
def test_the_toy_change_of_a_recipe_applies(diff: Path) -> None:
    try:
        run(ROOT, "git", "apply", "--check", str(diff))
    except AssertionError as error:
        name = diff.relative_to(ROOT)
        pytest.fail(
            f"{name} does not apply to this tree any more. Make it anew in a clean checkout: "
            f"`git apply --reject -C1 {name}`, make the changes that it leaves in *.rej, remove these files, "
            f"`git add -AN .`, `git diff -- . ':!docs' > {name}`; then take everything else back.\n{error}"
        )


@pytest.mark.parametrize("diff", TRIED)
def test_a_toy_change_that_follows_the_recipe_works(diff: Path, tree: Path) -> None:
    run(tree, "git", "apply", str(diff))
    run(tree, sys.executable, "-m", "docs.tables")
    run(tree, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *NODES[diff.stem])


@pytest.mark.parametrize("diff", ALL)
def test_a_recipe_names_every_file_that_its_toy_change_touches(diff: Path) -> None:
    (section,) = (text for text in RECIPES.values() if f"({diff.relative_to(ROOT)})" in text)
    named = set(re.findall(r"`([\w./-]+)`", section))
    for name, is_new in touched(diff):
        # Files that the change adds are not there yet: the recipe names their folder.
        expected = f"{Path(name).parent}/" if is_new else name
        assert expected in named, f"the recipe of {diff.name} does not name {expected}"


def test_every_recipe_has_a_toy_change_and_is_tried() -> None:
    linked = re.findall(r"\(docs/recipes/([\w-]+)\.diff\)", "".join(RECIPES.values()))
    assert sorted(linked) == sorted(diff.stem for diff in DIFFS) == sorted(NODES)
    assert len(RECIPES) == len(linked)


def test_the_recipe_of_an_attention_kind_names_every_file_that_knows_one() -> None:
    """Attention chunks stand for all: each file that reads or passes on their size is named."""
    named = set(re.findall(r"`([\w./-]+)`", SECTIONS["An attention kind"]))
    for room in ("services", "shared", "kernels"):
        for path in (path for end in ("py", "c", "h") for path in (ROOT / room).rglob(f"*.{end}")):
            if re.search(r"attention_chunk|chunked: bool|\.chunked\b", path.read_text(), re.IGNORECASE):
                assert str(path.relative_to(ROOT)) in named
