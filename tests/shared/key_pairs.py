"""Folders of key pairs, as ``pagewise keys`` makes them."""

from pathlib import Path

from pagewise_shared.curve import KINDS, Keys, Kind, public_file, secret_file
from zmq.auth import create_certificates


def make_key_pairs(directory: Path, *names: str, kind: Kind = "executor") -> Path:
    """A pair for each name, in the allow-list of ``kind`` (but for the scheduler's); returns the folder."""
    for name in names:
        secret_file(directory, name).parent.mkdir()
        public, _ = create_certificates(secret_file(directory, name).parent, name)
        secret_file(directory, name).chmod(0o600)
        public_file(directory, name, kind).parent.mkdir(parents=True, exist_ok=True)
        public_file(directory, name, kind).write_bytes(Path(public).read_bytes())
    return directory


def owner(keys: Keys, public_key: str) -> str | None:
    """The name of a public key on one of the allow-lists."""
    return next((names[public_key] for kind in KINDS if public_key in (names := keys.allowed(kind))), None)
