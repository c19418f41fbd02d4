"""Operators delete the KV of one cache salt, or of all salts of a key, and of no other."""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("fakeredis")
from pagewise_executor.tiers.block_names import chain, content_name
from pagewise_executor.tiers.disk import DiskTier
from pagewise_executor.tiers.hashed import HashedTier
from pagewise_executor.tiers.redis import RedisTier
from pagewise_executor.tiers.wipe import main
from pagewise_shared.block_hash import BlockName, root_hash, salt_tag, salt_tags
from pagewise_shared.protocol import pack_int32s

from benchmarks.processes import free_port
from tests.executor.tiers.names import BLOCK_BYTES, content, empty
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


@pytest.fixture(params=["disk", "store"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[HashedTier]:
    if request.param == "disk":
        yield DiskTier(tmp_path, content_name("0123", "f" * 16), BLOCK_BYTES, 2**30)
        return
    port = free_port()
    stop = start_fake(tmp_path, port)
    tier = RedisTier(f"redis://127.0.0.1:{port}/0", content_name("0123", "f" * 16), BLOCK_BYTES)
    yield tier
    tier.close()
    stop()


def test_a_key_is_deleted_with_its_salts_and_what_has_no_known_salt(storage: HashedTier) -> None:
    names = {salt: chain(root_hash("0123", salt), pack_int32s(range(12)), 4) for salt in (*SALTS, "all/old")}
    _, measured = storage.scratch(1)
    for salt, blocks in names.items():
        tags = {blocks[0].hash: salt_tags(salt)} if salt != "all/old" else {}
        assert all(storage.store(blocks, content(blocks), tags))
    storage.store(measured, content(measured))
    check_loads(storage, names["key:alice"])

    assert storage.delete_salt(salt_tag("key:alice")) == 9
    left = {salt for salt, blocks in names.items() if all(storage.contains(blocks))}
    assert left == {None, "key:bob"}
    assert storage.delete([*names["key:bob"][1:], *names["key:alice"]]) == 2
    assert storage.contains(names["key:bob"]) == [True, False, False]
    storage.delete(names[None][:1])
    assert storage.delete_salt(salt_tag("key:carol")) == 2, "their beginning is gone"
    assert storage.delete_salt(b"") == 1
    assert storage.contains(measured) == [True]
    assert storage.num_errors == 0


def check_loads(storage: HashedTier, names: list[BlockName]) -> None:
    rows = empty(len(names))
    assert all(storage.load(names, rows))
    assert (rows == content(names)).all()


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
