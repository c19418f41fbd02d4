"""How large the product is, and how much of it one has to read: a table, for the working tree or for a commit.

    python -m benchmarks.size.run [--commit COMMIT ...] [--list] [--json FILE]

``--commit``: checks these commits out beside the tree and measures them too, as columns of the same table.
``--list``: prints the files on a chat's way. ``--json``: adds the columns to the file's.

- lines: as ``wc -l`` counts them. complexity: branches, loops, handlers of exceptions, comprehensions, and operands of
  ``and`` and ``or``, each function without its inner functions.
- carriers of a prompt: classes with a field or an attribute that holds the tokens of a prompt.
- files on a chat's way: product files in which a function is entered between a streamed chat request's way into the
  socket and the first byte of its answer, in any process. The first request of the processes does not count; of the
  next ones, a file counts if each of them enters it, so that timers do not count.
- stand-in words: vague pronouns and verbs in docstrings and comments, where a noun would be clearer.
"""

import argparse
import ast
import io
import json
import os
import re
import shutil
import statistics
import subprocess
import tempfile
import time
import tokenize
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.processes import Served
from benchmarks.record import record_file, write_record

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("shared", "kernels", "services/gateway", "services/scheduler", "services/executor", "services/cli")
LANGUAGES = {"JavaScript and CSS": (".js", ".css"), "C": (".c", ".h")}
WORDS = {"what", "those", "told", "tells", "nobody", "somebody", "whoever", "whom"}
NAMED = {"lora": r"(?i)lora", "storage": r"(?i)storage", "a kernel": r"(?i)kernel"}
MAX_COMPLEXITY = 10
TRACED_REQUESTS = 4
_PROMPT = {"prompt", "prompts", "prompt_token_ids", "tokens", "token_ids"}
_TOKENS = re.compile(r"array\[int\]|bytes|\bint\]|Int32s|\w*Prompt\w*\b|LiveRequest")
_OTHER_TOKENS = re.compile(
    r"/(responses|drafts|logprobs|console|detokenizer|vocabulary|segment_report|prefetches)\b"
    r"|core/(memory|tiers|routing)"
    r"|services/cli"
)
"""Files whose tokens are not a request's prompt: answers, drafts, reports, blocks."""
_OTHER_CLASSES = {
    "BlockDetails",
    "Draft",
    "Ended",
    "LookUp",
    "Output",
    "Outputs",
    "SequenceDelta",
    "StepResult",
    "StreamProgress",
    "TokenSink",
    "PrefixRun",
    "_Bytes",
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", action="append", default=[])
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--json", type=record_file)
    arguments = parser.parse_args()
    kept = (
        json.loads(Path(arguments.json).read_text())["trees"]
        if arguments.json and Path(arguments.json).exists()
        else {}
    )
    for commit in arguments.commit:
        kept[commit] = _of_commit(commit)
    kept[_git("rev-parse", "--short=8", "HEAD")] = measure(ROOT, listed=arguments.list)
    _show(kept)
    if arguments.json:
        write_record(arguments.json, {"trees": kept})


def measure(root: Path, *, listed: bool = False) -> dict[str, Any]:
    """The numbers of a tree, by their captions. ``listed``: print the files on a chat's way."""
    names = subprocess.run(
        ["git", "-C", str(root), "ls-files", *PACKAGES], capture_output=True, text=True, check=True
    ).stdout.split()
    texts = {name: (root / name).read_text() for name in names if name.endswith(".py")}
    trees = {name: ast.parse(text) for name, text in texts.items()}
    functions = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, Function)]
    words = [word for name, text in texts.items() for word in _words(trees[name], text)]
    rows: dict[str, Any] = {"lines of Python": sum(text.count("\n") for text in texts.values())}
    for room in PACKAGES:
        rows[f"  {room}"] = sum(text.count("\n") for name, text in texts.items() if name.startswith(f"{room}/"))
    for language, suffixes in LANGUAGES.items():
        rows[f"lines of {language}"] = sum(
            (root / name).read_text().count("\n") for name in names if name.endswith(suffixes)
        )
    rows["Python files"] = len(texts)
    rows["lines of a file: median, 95%, longest"] = _spread([text.count("\n") for text in texts.values()])
    rows["lines of a function: median, 95%, longest"] = _spread(
        [(node.end_lineno or node.lineno) - node.lineno + 1 for node in functions]
    )
    rows[f"functions of complexity above {MAX_COMPLEXITY}"] = sum(
        _complexity(one) > MAX_COMPLEXITY for one in functions
    )
    rows["carriers of a prompt"] = sum(
        isinstance(node, ast.ClassDef) and node.name not in _OTHER_CLASSES and _carries_prompt(node)
        for name, tree in trees.items()
        if not _OTHER_TOKENS.search(name)
        for node in ast.walk(tree)
    )
    way = chat_files(root)
    if listed:
        print(*way, sep="\n")
    rows["files on a chat's way"] = len(way)
    for room in PACKAGES:
        rows[f"  {room} "] = sum(name.startswith(f"{room}/") for name in way)
    for caption, pattern in NAMED.items():
        rows[f"files that name {caption}"] = sum(bool(re.search(pattern, text)) for text in texts.values())
    rows["stand-in words per 10,000"] = round(1e4 * sum(word in WORDS for word in words) / len(words))
    return rows


def chat_files(root: Path) -> list[str]:
    """The product files that a chat request runs through until the first byte of its answer."""
    with tempfile.TemporaryDirectory() as folder:
        path = [str(Path(__file__).parent), *(str(root / package) for package in PACKAGES)]
        traced = {"SIZE_TRACE": folder, "SIZE_ROOT": str(root), "PYTHONPATH": os.pathsep.join(path)}
        before = dict(os.environ)
        os.environ |= traced
        try:
            server = Served("--threads=1")
        finally:
            os.environ.clear()
            os.environ |= before
        try:
            _chat(server.url)
            windows = []
            for _ in range(TRACED_REQUESTS):
                switch = Path(folder) / "on"
                switch.touch()
                time.sleep(0.3)
                windows.append(_chat(server.url))
                switch.unlink()
                time.sleep(0.5)
        finally:
            server.close()
        entered = [line.split() for file in Path(folder).iterdir() for line in file.read_text().splitlines()]
    ways = [{name for moment, name in entered if begin <= float(moment) <= end} for begin, end in windows]
    return sorted(set.intersection(*ways))


def _chat(url: str) -> tuple[float, float]:
    """When a streamed chat was sent, and when the first byte of its answer's body came, in seconds."""
    message = {"role": "user", "content": f"import os  # {time.monotonic()}"}
    body = {"model": "pagewise-demo", "messages": [message], "stream": True, "max_tokens": 8}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    begin = time.monotonic()
    with urllib.request.urlopen(request, timeout=60) as answer:
        answer.read(1)
        end = time.monotonic()
        answer.read()
    return begin, end


def _of_commit(commit: str) -> dict[str, Any]:
    """The numbers of a commit, with the compiled operations of this tree."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "tree"
        _git("worktree", "add", "--detach", str(root), commit)
        try:
            for library in (ROOT / "kernels").rglob("*.so"):
                shutil.copy(library, root / library.relative_to(ROOT))
            return measure(root)
        finally:
            _git("worktree", "remove", "--force", str(root))


def _complexity(function: Function) -> int:
    branches, nodes = 1, list(ast.iter_child_nodes(function))
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.BoolOp):
            branches += len(node.values) - 1
        branching = ast.If | ast.IfExp | ast.For | ast.AsyncFor | ast.While | ast.ExceptHandler | ast.comprehension
        branches += isinstance(node, branching)
        if not isinstance(node, Function | ast.ClassDef):
            nodes += ast.iter_child_nodes(node)
    return branches


def _carries_prompt(node: ast.ClassDef) -> bool:
    fields = [one for one in node.body if isinstance(one, ast.AnnAssign)]
    named = {ast.unparse(one.target): ast.unparse(one.annotation) for one in fields}
    for made in (one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"):
        named |= {f"self.{one.arg}": ast.unparse(one.annotation or made) for one in made.args.args}
    return any(name.split(".")[-1] in _PROMPT and _TOKENS.search(kind) for name, kind in named.items())


def _words(tree: ast.Module, text: str) -> Iterator[str]:
    """The words of docstrings and comments."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield from re.findall(r"[a-z']+", node.value.value.lower())
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield from re.findall(r"[a-z']+", token.string.lower())


def _spread(numbers: list[int]) -> str:
    return f"{statistics.median(numbers):g}, {statistics.quantiles(numbers, n=20)[-1]:g}, {max(numbers)}"


def _show(trees: dict[str, dict[str, Any]]) -> None:
    captions = list(dict.fromkeys(caption for rows in trees.values() for caption in rows))
    print(f"{'':<44}" + "".join(f"{name:>18}" for name in trees))
    for caption in captions:
        print(f"{caption:<44}" + "".join(f"{rows.get(caption, '')!s:>18}" for rows in trees.values()))


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True
    ).stdout.strip()


if __name__ == "__main__":
    main()
