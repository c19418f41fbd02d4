"""A service as a child process: its inheritance, the way of its lines, and its stop."""

import asyncio
import contextlib
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pagewise import process
from pagewise.main import main
from pagewise.process import Service
from pagewise_shared.service_process import CANNOT_START
from pagewise_shared.version import package_version

WriteCode = Callable[[str], int]


@pytest.fixture
def write_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WriteCode:
    """Writes the code that runs in place of a service, as ``python -m service_under_test``."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return (tmp_path / "service_under_test.py").write_text


def service(on_line: list[str], *argv: str) -> Service:
    return Service("tested", "service_under_test", argv, on_line.append)


async def test_options_reach_a_service_as_arguments_only(
    write_code: WriteCode, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A variable that the command line overruled must not come back in the child.
    monkeypatch.setenv("PAGEWISE_MAX_NUM_SEQS", "7")
    write_code("import os, sys; print(os.environ.get('PAGEWISE_MAX_NUM_SEQS'), sys.argv[1:])")
    lines: list[str] = []
    assert await service(lines, "--port=1").run() == 0
    assert lines == ["None ['--port=1']"]


async def test_lines_are_relayed_behind_the_name_whatever_they_are(
    write_code: WriteCode, capsys: pytest.CaptureFixture[str]
) -> None:
    write_code(
        "import sys; e = sys.stderr.buffer; e.write(b'x' * 1_000_000 + b'\\n' + b'bad \\xff\\n' + b'last'); sys.exit(3)"
    )
    assert await service([]).run() == 3
    assert [line for line in capsys.readouterr().err.splitlines() if "xxx" not in line] == [
        "tested     | bad \ufffd",
        "tested     | last",
    ]


@pytest.mark.parametrize(("reaction", "code"), [("SIG_DFL", -15), ("SIG_IGN", -9)])
async def test_a_service_that_ignores_sigterm_is_killed(
    write_code: WriteCode, monkeypatch: pytest.MonkeyPatch, reaction: str, code: int
) -> None:
    monkeypatch.setattr(process, "STOP_SECONDS", 1.0)
    write_code(f"import signal, time; signal.signal(signal.SIGTERM, signal.{reaction}); print('up'); time.sleep(60)")
    up = asyncio.Event()
    tested = Service("tested", "service_under_test", [], lambda line: up.set())
    running = asyncio.create_task(tested.run())
    await up.wait()
    await tested.stop()
    assert await running == code
    assert tested.pid is None
    await tested.stop()


def test_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "serve [MODEL]" in capsys.readouterr().out
    assert main([]) == 2
    assert main(["no-such-command"]) == 2
    assert "no-such-command" in capsys.readouterr().err
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"pagewise {package_version()}\n"


def test_a_misspelt_variable_is_told_by_commands_that_log_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PAGEWISE_KEYES", "elsewhere")
    assert main(["keys", "--keys", str(tmp_path), "list"]) == 0
    assert capsys.readouterr().err.splitlines() == [
        "pagewise keys: the environment variable PAGEWISE_KEYES is unknown and has no effect: "
        "did you mean PAGEWISE_KEYS?"
    ]


def test_a_command_that_logs_tells_a_misspelt_variable_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEWISE_KEYES", "elsewhere")
    command = [sys.executable, "-m", "pagewise.main", "up"]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    assert said.count("PAGEWISE_KEYES is unknown") == 1


async def test_a_process_that_the_machine_has_no_room_for_cannot_start(
    write_code: WriteCode,
) -> None:
    write_code("print('up')")
    tested, (soft, hard) = service([]), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        assert await tested.run() == CANNOT_START
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "Too many open files" in tested.reason
    assert await tested.run() == 0
    assert tested.reason == ""


async def test_a_log_that_cannot_be_written_ends_no_service(
    write_code: WriteCode, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_code("import sys; print('bad', file=sys.stderr); print('good')")
    lines: list[str] = []
    reading, writing = os.pipe()
    os.close(reading)
    with contextlib.suppress(OSError), os.fdopen(writing, "w") as unread:  # which closes with unwritten text
        monkeypatch.setattr(sys, "stderr", unread)
        assert await service(lines).run() == 0
        monkeypatch.undo()
    assert lines == ["good"]
