"""An operator deletes the KV of one cache salt, and of no other."""

from pathlib import Path

import pytest

pytest.importorskip("fakeredis")
from pagewise_executor.tiers.block_names import chain, content_name
from pagewise_executor.tiers.disk import DiskTier
from pagewise_executor.tiers.hashed import HashedTier
from pagewise_executor.tiers.redis import RedisTier
from pagewise_executor.tiers.wipe import main
from pagewise_shared.block_hash import BlockName, root_hash
from pagewise_shared.protocol import pack_int32s

from benchmarks.processes import free_port
from tests.executor.tiers.names import BLOCK_BYTES, content
from tests.redis_servers import start_fake

MODELS = ("0123", "0123-4096")
SALTS = (None, "key:alice", "key:alice/other", "key:bob")


def stored(storages: list[HashedTier]) -> dict[tuple[str, str | None], list[BlockName]]:
    """Write two prefixes that part after three blocks, for each model and salt."""
    names: dict[tuple[str, str | None], list[BlockName]] = {}
    for model, storage in zip(MODELS, storages, strict=True):
        for salt in SALTS:
            root = root_hash(model, salt)
            one = chain(root, pack_int32s(range(40)), 4)
            other = chain(root, pack_int32s([*range(12), *range(100, 120)]), 4)
            names[model, salt] = [*one, *other[3:]]
            assert all(storage.store(names[model, salt], content(names[model, salt])))
    return names


def check(storages: list[HashedTier], names: dict[tuple[str, str | None], list[BlockName]], gone: str) -> None:
    for (model, salt), blocks in names.items():
        assert storages[MODELS.index(model)].contains(blocks) == [salt != gone] * 15


def test_a_salt_is_wiped_from_a_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    storages: list[HashedTier] = [
        DiskTier(tmp_path, content_name(model, "f" * 16), BLOCK_BYTES, 2**30) for model in MODELS
    ]
    names = stored(storages)
    assert main(["--disk-cache", str(tmp_path), "--salt", "key:alice"]) == 0
    assert capsys.readouterr().out == f"30 blocks deleted from {tmp_path}\n"
    check(storages, names, "key:alice")
    assert main(["--disk-cache", str(tmp_path), "--salt", "key:carol"]) == 0
    assert capsys.readouterr().out == f"0 blocks deleted from {tmp_path}\n"


def test_a_salt_is_wiped_from_a_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    stop = start_fake(tmp_path, port)
    url = f"redis://127.0.0.1:{port}/0"
    storages: list[HashedTier] = [RedisTier(url, content_name(model, "f" * 16), BLOCK_BYTES) for model in MODELS]
    names = stored(storages)
    assert main(["--store", url, "--salt", "key:alice/other"]) == 0
    assert capsys.readouterr().out == "30 blocks deleted from the store\n"
    check(storages, names, "key:alice/other")
    for storage in storages:
        storage.close()
    stop()


def test_what_cannot_be_done_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, text in [
        (["--salt", "key:a"], "give --disk-cache, --store, or both"),
        (["--salt", "key:a", "--disk-cache", str(tmp_path / "none")], "is no folder"),
    ]:
        with pytest.raises(SystemExit):
            main(arguments)
        assert text in capsys.readouterr().err
    assert main(["--salt", "key:a", "--store", f"redis://127.0.0.1:{free_port()}"]) == 1
    assert "pagewise wipe: " in capsys.readouterr().err
