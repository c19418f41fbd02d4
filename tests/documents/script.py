"""Turns a document into a script: the commands of a reader who follows it from its beginning to its end.

Blocks of code that are marked ``sh`` or ``python`` are run one after the other in one shell,
from the repository's root. A comment in the line before a block changes this:

- ``<!-- background: TEXT -->``: it does not end. It is started, and the script continues once it has printed TEXT.
- ``<!-- stop -->`` is not followed by a block: the background process is interrupted, as by ctrl-c, and ends.
- ``<!-- prints: TEXT -->``: its output has to contain TEXT.
- ``<!-- fails -->``: it has to fail.
- ``<!-- terminal: TEXT -->``: it is shown full-screen, in a terminal, until it has written TEXT; then ``q`` is typed.
- ``<!-- run by: PATH -->``: it is not run, because the tests in PATH run it.
- ``<!-- not run: REASON -->``: it is not run.
"""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

SECONDS = 120
"""How long a background process may take until it has printed the document's TEXT."""

_BLOCK = re.compile(
    r"^(?:<!-- (?P<directive>(?!stop )[a-z ]+)(?:: (?P<argument>.*?))? -->\n)?"
    r"```(?P<language>sh|python)\n(?P<code>.*?)^```$"
    r"|^<!-- (?P<stop>stop) -->$",
    re.MULTILINE | re.DOTALL,
)
_DIRECTIVES = (None, "background", "prints", "fails", "terminal", "run by", "not run")
_TERMINAL = Path(__file__).parents[1] / "terminal.py"

_HEAD = """
set -eum # jobs in the background have process groups of their own, and do not ignore interrupts
running=""
stop() {
    for one in $running; do kill -INT -- -$one 2>/dev/null || true; done
    for one in $running; do
        wait $one && continue || code=$?
        test $code = 130 || test $code = 137 || { echo "*** exit code $code"; tail "$logs"/*; exit 1; }
    done
    running=""
}
killed() { for one in $running; do kill -KILL -- -$one 2>/dev/null || true; done; }
trap killed EXIT
started() { # LOG TEXT PID: wait until LOG has TEXT
    for _ in $(seq SECONDS0); do
        grep -qF -- "$2" "$1" && return
        kill -0 $3 2>/dev/null || break
        sleep 0.1
    done
    echo "*** it never printed: $2"; cat "$1"; exit 1
}
""".replace("SECONDS", str(SECONDS))


class Block(NamedTuple):
    """A block of code of a document; ``line``: where it begins."""

    language: str
    code: str
    line: int
    directive: str | None
    argument: str


def blocks(document: Path) -> list[Block]:
    """Return the blocks of a document in order; one with the directive ``stop`` has no code.

    Raises:
        ValueError: a directive is not known, or lacks its argument.
    """
    text = document.read_text()
    found = []
    for match in _BLOCK.finditer(text):
        directive, argument = match["stop"] or match["directive"], match["argument"] or ""
        line = text.count("\n", 0, match.start()) + 1
        if directive not in (*_DIRECTIVES, "stop"):
            raise ValueError(f"{document.name}:{line}: there is no directive {directive!r}")
        if (directive in (None, "stop", "fails")) == bool(argument):
            raise ValueError(f"{document.name}:{line}: {directive} and its argument {argument!r} do not go together")
        found.append(Block(match["language"] or "", match["code"] or "", line, directive, argument))
    return found


def script(document: Path) -> str:
    """Return a script for bash, which fails where a command of the document fails. ``$logs``: a folder for logs."""
    return _HEAD + "\n".join(_lines(block) for block in blocks(document)) + "\nstop\n"


def _lines(block: Block) -> str:
    name = f'"$logs"/{block.line}.log'
    told = f"echo '*** line {block.line}'"
    code = block.code if block.language != "python" else f"python - <<'END_OF_PYTHON'\n{block.code}END_OF_PYTHON\n"
    text = shlex.quote(block.argument)
    match block.directive:
        case "run by" | "not run":
            return ""
        case "stop":
            return f"{told}; stop"
        case "background":
            program = shlex.quote(f"exec {code}" if code.count("\n") == 1 else code)
            return f'{told}\nbash -euc {program} >{name} 2>&1 &\nrunning="$! $running"\nstarted {name} {text} $!'
        case "prints":
            shown = f"{told}\n{{\n{code}}} >{name} 2>&1 || {{ cat {name}; exit 1; }}\ncat {name}"
            return f"{shown}\ngrep -qF -- {text} {name}"
        case "terminal":
            command = shlex.join(["python", str(_TERMINAL), block.argument, "bash", "-euc", code])
            return f"{told}\n{command}"
        case "fails":
            return f"{told}\nif (\n{code}); then echo '*** it did not fail'; exit 1; fi"
        case _:
            return f"{told}\n{code}"
