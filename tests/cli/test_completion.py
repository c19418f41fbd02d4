"""A real shell completes commands, options and words by the script that ``pagewise completion`` prints."""

import shutil
import subprocess

import pytest
from pagewise.main import COMMANDS, main
from pagewise_shared.config import ServeConfig
from pagewise_shared.config.reading import flags_of


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (["pagewise", ""], sorted(COMMANDS)),
        (["pagewise", "se"], ["segments", "serve"]),
        (["pagewise", "serve", "--tensor-par"], ["--tensor-parallel", "--tensor-parallel-size"]),
        (["pagewise", "serve", "some/model", "--"], sorted(flag for flag in flags_of(ServeConfig) if flag[:2] == "--")),
        (["pagewise", "serve", "--dtype", ""], ["auto", "bfloat16", "float16", "float32"]),
        (["pagewise", "gateways", "--log-level", "w"], ["warning"]),
        (["pagewise", "pmap", "--"], []),
    ],
)
def test_bash_completes(line: list[str], expected: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    words = " ".join(f"'{word}'" for word in line)
    code = f"COMP_WORDS=({words}); COMP_CWORD={len(line) - 1}; _pagewise; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    check = "complete -p pagewise >/dev/null || exit 1\n"
    run = ["bash", "--norc", "-c", script("bash", capsys) + check + code]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(set(done.stdout.split())) == sorted(expected)


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_others_can_read_their_scripts(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = script(shell, capsys)
    assert "tensor-parallel-size" in text
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    assert subprocess.run([shell, "-n"], input=text, text=True, timeout=60).returncode == 0
