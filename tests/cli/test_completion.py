"""A real shell completes commands, options and words by the script that ``pagewise completion`` prints."""

import contextlib
import os
import pty
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pagewise.main import COMMANDS, main
from pagewise_shared.config import ServeConfig
from pagewise_shared.config.reading import flags_of

PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
"""With ``pagewise``, which the scripts ask."""
FLAGS = sorted(flag for flag in flags_of(ServeConfig) if flag.startswith("--") and flag != "--model")
"""``--model`` is not in the help either: the model is an argument."""

LINES = [
    ("pagewise ", sorted(COMMANDS)),
    ("pagewise se", ["segments", "serve"]),
    ("pagewise serve --tensor-par", ["--tensor-parallel", "--tensor-parallel-size"]),
    ("pagewise serve some/model --", FLAGS),
    ("pagewise serve --dtype ", ["auto", "bfloat16", "float16", "float32"]),
    ("pagewise gateways --log-level w", ["warning"]),
    ("pagewise pmap --", []),
]
"""Begun commands, and the words that may end them in each shell."""


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(("line", "expected"), [*LINES, ("pagewise serve --dtype=fl", ["float16", "float32"])])
def test_bash_completes(line: str, expected: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code = f"""{script("bash", capsys)}
complete -p pagewise >/dev/null || exit 1
COMP_LINE={shlex.quote(line)} COMP_POINT={len(line)} COMP_TYPE=9
_python_argcomplete pagewise
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    run = ["bash", "--norc", "-c", code]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60, env=os.environ | {"PATH": PATH})
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.split()) == sorted(expected)


@pytest.mark.parametrize(
    ("typed", "given"),
    [
        ("pagewise gateways --log-level w\t", "gateways --log-level warning"),
        ("pagewise serve some --dty\t fl\t32", "serve some --dtype float32"),
        ("pagewise serve --dtype=bf\t", "serve --dtype=bfloat16"),
        ("pagewise se\t", "se"),
        ("pagewise vm\t 1", "vmstat 1"),
        ("pagewise serve --api-keys-file /etc/pass\t", "serve --api-keys-file /etc/passwd"),
    ],
)
def test_zsh_completes_what_is_typed(
    typed: str, given: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not installed")
    rc = "autoload -U compinit && compinit -u -D\n" + script("zsh", capsys)
    (tmp_path / ".zshrc").write_text(rc)
    real, stub = shutil.which("pagewise", path=PATH), tmp_path / "pagewise"
    stub.write_text(f'#!/bin/sh\n[ -z "$_ARGCOMPLETE" ] || exec {real} "$@"\necho "$*" >{tmp_path}/given\n')
    stub.chmod(0o755)
    terminal, end = pty.openpty()
    process = subprocess.Popen(
        ["zsh", "-i"],
        stdin=end,
        stdout=end,
        stderr=end,
        start_new_session=True,
        env=os.environ | {"ZDOTDIR": str(tmp_path), "TERM": "dumb", "PATH": f"{tmp_path}:{PATH}"},
    )
    os.close(end)
    with os.fdopen(terminal, "r+b", buffering=0) as screen:
        screen.write(f"{typed}\nexit\n".encode())
        with contextlib.suppress(OSError):  # Linux's way to say that a terminal is closed
            while screen.read(4096):
                pass
    assert process.wait(60) == 0
    assert " ".join((tmp_path / "given").read_text().split()) == given


@pytest.mark.parametrize(
    ("line", "expected"), [*LINES, ("pagewise serve --dtype=fl", ["--dtype=float16", "--dtype=float32"])]
)
def test_fish_completes(line: str, expected: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    (tmp_path / "pagewise.fish").write_text(script("fish", capsys))
    code = f"source {tmp_path}/pagewise.fish; complete -C '{line}'"
    run = ["fish", "--no-config", "-c", code]
    done = subprocess.run(
        run, capture_output=True, text=True, timeout=60, cwd=tmp_path, env=os.environ | {"PATH": PATH}
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(part.split("\t")[0] for part in done.stdout.splitlines()) == sorted(expected)
