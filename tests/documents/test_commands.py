"""The README's commands and the tutorial's work as described, in the order in which a reader types them."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents.script import blocks, script

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs/tutorial").glob("*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_block_is_run_or_says_why_not(document: Path) -> None:
    found = blocks(document)
    assert [block for block in found if block.directive not in ("not run", "run by", "stop")], "nothing is run"
    for block in found:
        if block.directive == "run by":
            assert (ROOT / block.argument).exists(), f"{document.name}:{block.line}"


def test_what_is_in_the_background_is_waited_for_and_interrupted(tmp_path: Path) -> None:
    document = tmp_path / "document.md"
    document.write_text(
        "<!-- background: ready -->\n```sh\ntrap 'echo ended >ended; exit 0' INT\necho ready\n"
        "while :; do sleep 0.1; done\n"
        "```\n<!-- prints: 2 -->\n```python\nprint(1 + 1)\n```\n<!-- fails -->\n```sh\nfalse\n```\n<!-- stop -->\n"
        "```sh\ncat ended\n```\n"
        "<!-- terminal: 120 -->\n```sh\nstty size; read -rsn1 key; test $key = q; touch typed\n```\n"
    )
    assert "ended" in run(document, tmp_path, tmp_path).splitlines()
    assert (tmp_path / "typed").exists()
    for wrong, message in (
        ("```sh\nfalse\n```\n", "line 1"),
        ("<!-- prints: x -->\n```sh\necho y\n```\n", "y"),
        ("<!-- terminal: x -->\n```sh\necho y\n```\n", "never wrote 'x'"),
    ):
        document.write_text(wrong)
        with pytest.raises(AssertionError, match=message):
            run(document, tmp_path, tmp_path)
    document.write_text("<!-- perhaps -->\n```sh\ntrue\n```\n")
    with pytest.raises(ValueError, match="no directive 'perhaps'"):
        blocks(document)


@pytest.mark.documents
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_a_document_can_be_followed(document: Path, tmp_path: Path) -> None:
    assert not (ROOT / "keys").exists(), "the folder keys is in the way, which documents make"
    try:
        run(document, ROOT, tmp_path)
    finally:
        shutil.rmtree(ROOT / "keys", ignore_errors=True)


def run(document: Path, folder: Path, logs: Path) -> str:
    """Follow a document in a folder, with its ports to itself if the system allows that; return the output."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = {"PATH": path, "HOME": str(logs), "logs": str(logs), "LANG": "C.UTF-8"}
    command = ["bash", "-c", script(document)]
    if os.geteuid() == 0:  # in a network of its own
        command = ["unshare", "--net", "bash", "-c", 'ip link set lo up; exec "$@"', "-", *command]
    done = subprocess.run(
        command,
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
        # Who started the tests may ignore interrupts, which a shell could not change.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert done.returncode == 0, done.stdout
    return done.stdout
