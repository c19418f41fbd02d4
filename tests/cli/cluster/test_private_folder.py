"""Folders for secrets: their owners, and their removal."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from pagewise.cluster.private_folder import PrivateFolder

PREFIX = "pagewise-test-"


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_only_folders_of_the_dead_are_removed(temporary: Path) -> None:
    living = PrivateFolder(PREFIX).path()
    assert living.stat().st_mode & 0o777 == 0o700
    code = (
        "import sys, time\nfrom pagewise.cluster.private_folder import PrivateFolder\n"
        f"folder = PrivateFolder({PREFIX!r})\nprint(folder.path(), flush=True)\ntime.sleep(600)"
    )
    environment = os.environ | {"TMPDIR": str(temporary)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment) as other:
        assert other.stdout is not None
        others = Path(other.stdout.readline().strip())
        third = PrivateFolder(PREFIX)
        assert set(temporary.iterdir()) == {living, others, third.path()}, "whatever the process ids are"
        other.send_signal(signal.SIGKILL)
    PrivateFolder(PREFIX).remove()
    assert set(temporary.iterdir()) == {living, third.path()}


def test_a_folder_that_was_removed_is_made_again_and_locked_again() -> None:
    folder = PrivateFolder(PREFIX)
    shutil.rmtree(folder.path())
    assert folder.path().stat().st_mode & 0o777 == 0o700
    (folder.path() / "secret").touch()
    PrivateFolder(PREFIX)
    assert (folder.path() / "secret").exists()


def test_what_somebody_else_has_put_in_its_place_gets_no_secrets(temporary: Path) -> None:
    folder = PrivateFolder(PREFIX)
    place = folder.path()
    shutil.rmtree(place)
    (temporary / "elsewhere").mkdir()
    place.symlink_to(temporary / "elsewhere")
    with pytest.raises(PermissionError, match="another user's file"):
        folder.path()
