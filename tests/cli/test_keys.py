"""``pagewise keys``: the keys that it makes, and that it never overwrites or lets in by accident."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pagewise.keys import keys
from pagewise_shared.curve import Keys, Kind, public_file, secret_file
from zmq.auth import load_certificate

from tests.shared.key_pairs import owner


def run(directory: Path, *arguments: str) -> int:
    return keys(["--keys", str(directory), *arguments])


def test_init_makes_a_pair_for_the_scheduler_one_for_executors_and_one_for_gateways(tmp_path: Path) -> None:
    assert run(tmp_path, "init") == 0
    kinds: dict[str, Kind] = {"scheduler": "executor", "executor": "executor", "gateway": "gateway"}
    for name, kind in kinds.items():
        secret = secret_file(tmp_path, name)
        assert secret.stat().st_mode & 0o777 == 0o600
        assert secret.parent.stat().st_mode & 0o777 == 0o700
        assert load_certificate(secret)[0] == load_certificate(public_file(tmp_path, name, kind))[0]
        assert load_certificate(public_file(tmp_path, name, kind))[1] is None, "no secret in the public folder"
    keys = Keys(tmp_path, "scheduler")
    for name in ("executor", "gateway"):
        public = Keys(tmp_path, name).public.decode()
        assert (owner(keys, public), keys.kind(public)) == (name, name)


@pytest.mark.parametrize("umask", [0, 0o002, 0o077])
def test_nobody_else_can_change_keys_whatever_the_umask_is(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        assert run(tmp_path / "keys", "init") == 0
        assert run(tmp_path / "keys", "add", "gpu-7") == 0
    finally:
        os.umask(before)
    assert not [path for path in (tmp_path / "keys").rglob("*") if path.stat().st_mode & 0o022]
    assert set(Keys(tmp_path / "keys", "scheduler").allowed().values()) == {"executor", "gpu-7"}


def test_keys_are_added_for_a_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, "init")
    assert run(tmp_path, "add", "--kind", "gateway", "edge-1", "edge-2") == 0
    assert run(tmp_path, "add", "gpu-7") == 0
    keys = Keys(tmp_path, "scheduler")
    assert set(keys.allowed("gateway").values()) == {"gateway", "edge-1", "edge-2"}
    assert set(keys.allowed().values()) == {"executor", "gpu-7"}
    assert run(tmp_path, "add", "--kind", "gateway", "gpu-7") == 1, "a name has one key"
    assert run(tmp_path, "revoke", "edge-1", "gpu-7") == 0
    assert set(keys.allowed("gateway").values()) == {"gateway", "edge-2"}
    assert set(keys.allowed().values()) == {"executor"}


def test_a_folder_from_before_gateways_gets_their_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, "init")
    run(tmp_path, "revoke", "gateway")
    (tmp_path / "public" / "gateways").rmdir()
    assert set(Keys(tmp_path, "scheduler").allowed().values()) == {"executor"}
    assert run(tmp_path, "init") == 0
    assert set(Keys(tmp_path, "scheduler").allowed("gateway").values()) == {"gateway"}
    # Unless an executor has this name.
    run(tmp_path, "revoke", "gateway")
    run(tmp_path, "add", "gateway")
    capsys.readouterr()
    assert run(tmp_path, "init") == 1
    assert "gateway is the key of an executor" in capsys.readouterr().err


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "init") == 0
    assert run(tmp_path, "add", "gpu-7") == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.key*")}
    assert len(before) == 12
    assert run(tmp_path, "init") == 0
    assert "is there already" in capsys.readouterr().out
    assert run(tmp_path, "add", "gpu-7") == 1
    assert "is there already" in capsys.readouterr().err
    assert run(tmp_path, "add", "gpu-8", "gpu-7") == 1, "all or none"
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*.key*")}


def test_half_a_pair_is_not_completed_with_another_half(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, "init")
    public_file(tmp_path, "executor").unlink()
    assert run(tmp_path, "init") == 1
    assert "only one half of the key executor" in capsys.readouterr().err


def test_a_key_that_is_revoked_is_gone_and_its_name_is_free(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, "init")
    run(tmp_path, "add", "gpu-7")
    old = Keys(tmp_path, "gpu-7")
    assert run(tmp_path, "revoke", "gpu-7") == 0
    assert not (tmp_path / "gpu-7").exists()
    assert owner(Keys(tmp_path, "scheduler"), old.public.decode()) is None
    assert run(tmp_path, "revoke", "gpu-7") == 1
    assert "no key 'gpu-7'" in capsys.readouterr().err
    assert run(tmp_path, "add", "gpu-7") == 0
    assert Keys(tmp_path, "gpu-7").public != old.public


def test_names_are_listed_with_their_public_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, "init")
    capsys.readouterr()
    assert run(tmp_path, "list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [[name, name] for name in ("executor", "gateway", "scheduler")]
    assert Keys(tmp_path, "executor").public.decode() in lines[0]
    assert Keys(tmp_path, "executor").secret.decode() not in lines[0]


@pytest.mark.parametrize("name", ["scheduler", "public", "../x", "a/b", "", ".hidden", "a b"])
def test_names_that_are_none_are_refused(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, "init")
    assert run(tmp_path, "add", name) == 1
    assert "cannot be a key's name" in capsys.readouterr().err


def test_the_folder_comes_from_the_environment_too(tmp_path: Path) -> None:
    environ = os.environ | {"PAGEWISE_KEYS": str(tmp_path / "mine")}
    command = [sys.executable, "-m", "pagewise.main", "keys", "init"]
    assert subprocess.run(command, env=environ, capture_output=True, timeout=60).returncode == 0
    assert (tmp_path / "mine" / "public" / "scheduler.key").exists()
