"""``pagewise keys``: key pairs of the scheduler, executors and gateways, in a folder that ``--keys`` names."""

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from pagewise_shared.curve import EXECUTOR, GATEWAY, GATEWAYS, KINDS, PUBLIC, SCHEDULER, Kind, public_file, secret_file
from zmq.auth import create_certificates, load_certificate

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_INITIAL: dict[str, Kind] = {SCHEDULER: "executor", EXECUTOR: "executor", GATEWAY: "gateway"}
"""The names of the pairs that ``init`` makes, and the kind of folder for their public keys."""


class KeysError(Exception):
    """The folder of keys cannot be changed."""


def keys(arguments: Sequence[str]) -> int:
    """Run ``pagewise keys`` with these arguments; returns the process's exit code."""
    options = _parser().parse_args(arguments)
    directory = Path(options.keys)
    names: list[str] = getattr(options, "names", [])
    try:
        match options.verb:
            case "init":
                _init(directory)
            case "add":
                _add(directory, names, options.kind)
            case "revoke":
                _revoke(directory, names)
            case _:
                _list(directory)
    except (KeysError, OSError, ValueError) as error:
        print(f"pagewise keys: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pagewise keys",
        description="Key pairs that encrypt and authenticate the connections of a scheduler with its executors and "
        "gateways. A running scheduler notices additions and revocations by itself. On another host, an executor or a "
        "gateway needs the folder public/ and the folder of its own name.",
    )
    # The verbs have the option too. Its default is suppressed there, so that it does not replace a value before them.
    folder = argparse.ArgumentParser(add_help=False)
    for each, default in ((parser, os.environ.get("PAGEWISE_KEYS") or "keys"), (folder, argparse.SUPPRESS)):
        each.add_argument(
            "--keys", metavar="DIR", default=default, help="folder of keys (default: PAGEWISE_KEYS, or keys)"
        )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    verbs.add_parser("init", parents=[folder], help=f"make the key pairs {', '.join(_INITIAL)}; existing ones stay")
    verbs.add_parser("list", parents=[folder], help="print names, kinds and public keys")
    add = verbs.add_parser("add", parents=[folder], help="make a key pair for an executor or a gateway, and allow it")
    add.add_argument("--kind", choices=KINDS, default="executor", help="the kind of its owner (default: executor)")
    revoke = verbs.add_parser("revoke", parents=[folder], help="delete a key, and disconnect its owner")
    for verb in (add, revoke):
        verb.add_argument("names", nargs="+", metavar="NAME")
    return parser


def _init(directory: Path) -> None:
    for name, kind in _INITIAL.items():
        if (other := _kind(directory, name)) not in (None, kind):
            raise KeysError(f"{name} is the key of an {other}: revoke it first")
        present = [path for path in (public_file(directory, name, kind), secret_file(directory, name)) if path.exists()]
        if len(present) == 1:
            raise KeysError(
                f"only one half of the key {name} is there, {present[0]}: remove it, or restore the other half"
            )
        if present:
            print(f"{name} is there already")
        else:
            _make(directory, name, kind)


def _add(directory: Path, names: Sequence[str], kind: Kind) -> None:
    for name in names:
        if not _NAME.fullmatch(name) or name in (SCHEDULER, PUBLIC):
            raise KeysError(f"{name!r} cannot be a key's name: letters, digits, '.', '_' and '-', not {PUBLIC}")
        for path in (*(public_file(directory, name, each) for each in KINDS), secret_file(directory, name)):
            if path.exists():
                raise KeysError(f"{path} is there already: revoke {name} first, or take another name")
    if not public_file(directory, SCHEDULER).exists():
        raise KeysError(f"{directory} has no key of the scheduler: run `pagewise keys init` first")
    for name in names:
        _make(directory, name, kind)


def _kind(directory: Path, name: str) -> Kind | None:
    """Return the kind of the key ``name``, or None if there is no public key of this name."""
    return next((kind for kind in KINDS if public_file(directory, name, kind).exists()), None)


def _make(directory: Path, name: str, kind: Kind) -> None:
    """Make a pair: first the secret half, readable by its owner only, then the public half, by an atomic rename.

    Whatever the umask is, only the owner can write to the new folders and files.
    """
    public = public_file(directory, name, kind)
    before = os.umask(0o077)
    os.umask(before | 0o022)
    try:
        public.parent.mkdir(parents=True, exist_ok=True)
        os.umask(0o077)
        secret_file(directory, name).parent.mkdir(exist_ok=True)
        made, _ = create_certificates(secret_file(directory, name).parent, name)
        os.umask(before | 0o022)
        unfinished = public.with_suffix(".new")
        unfinished.write_bytes(Path(made).read_bytes())
        unfinished.replace(public)
    finally:
        os.umask(before)
    print(f"{name} made: {secret_file(directory, name)} is its secret")


def _revoke(directory: Path, names: Sequence[str]) -> None:
    kinds: dict[str, Kind] = {}
    for name in names:
        if not _NAME.fullmatch(name) or (kind := _kind(directory, name)) is None:
            raise KeysError(f"there is no key {name!r} in {directory / PUBLIC}")
        kinds[name] = kind
    for name, kind in kinds.items():
        public_file(directory, name, kind).unlink()
        secret = secret_file(directory, name)
        for path in (secret, secret.with_suffix(".key")):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # it holds other files, or is a mount point
            secret.parent.rmdir()
        after = "; run `pagewise keys init`, then start all processes again"
        print(f"{name} revoked{after if name == SCHEDULER else ''}")


def _list(directory: Path) -> None:
    for path in sorted([*(directory / PUBLIC).glob("*.key"), *(directory / PUBLIC / GATEWAYS).glob("*.key")]):
        name = path.stem
        kind = GATEWAY if path.parent.name == GATEWAYS else SCHEDULER if name == SCHEDULER else EXECUTOR
        here = "its secret is here too" if secret_file(directory, name).exists() else ""
        print(f"{name:<20} {kind:<10} {load_certificate(path)[0].decode()}  {here}".rstrip())
