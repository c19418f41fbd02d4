"""``pagewise keys``: the key pairs of the scheduler and its executors, in a folder that ``--keys`` names."""

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from pagewise_shared.curve import EXECUTOR, PUBLIC, SCHEDULER, public_file, secret_file
from zmq.auth import create_certificates, load_certificate

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class KeysError(Exception):
    """The folder of keys cannot be changed as asked; the text says why."""


def keys(arguments: Sequence[str]) -> int:
    """Run one of the verbs; returns the process's exit code."""
    options = _parser().parse_args(arguments)
    directory = Path(options.keys)
    names: list[str] = getattr(options, "names", [])
    try:
        match options.verb:
            case "init":
                _init(directory)
            case "add":
                _add(directory, names)
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
        description="Key pairs that encrypt and authenticate the connections between a scheduler and its executors. A "
        "scheduler takes additions and revocations up by itself. On another host an executor needs the folder public/ "
        "and the folder of its own name.",
    )
    # On the verbs too, where it must not undo what came before them.
    folder = argparse.ArgumentParser(add_help=False)
    for each, default in ((parser, os.environ.get("PAGEWISE_KEYS") or "keys"), (folder, argparse.SUPPRESS)):
        each.add_argument(
            "--keys", metavar="DIR", default=default, help="folder of keys (default: PAGEWISE_KEYS, or keys)"
        )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    verbs.add_parser(
        "init", parents=[folder], help=f"make the pairs {SCHEDULER!r} and {EXECUTOR!r}; those that are there stay"
    )
    verbs.add_parser("list", parents=[folder], help="print names and public keys")
    for verb, text in (
        ("add", "make a pair for an executor and let it in"),
        ("revoke", "delete a key: its owner is cut off"),
    ):
        verbs.add_parser(verb, parents=[folder], help=text).add_argument("names", nargs="+", metavar="NAME")
    return parser


def _init(directory: Path) -> None:
    for name in (SCHEDULER, EXECUTOR):
        present = [path for path in (public_file(directory, name), secret_file(directory, name)) if path.exists()]
        if len(present) == 1:
            raise KeysError(
                f"only one half of the key {name} is there, {present[0]}: remove it, or bring the other half"
            )
        if present:
            print(f"{name} is there already")
        else:
            _make(directory, name)


def _add(directory: Path, names: Sequence[str]) -> None:
    for name in names:
        if not _NAME.fullmatch(name) or name in (SCHEDULER, PUBLIC):
            raise KeysError(f"{name!r} cannot be a key's name: letters, digits, '.', '_' and '-', not {PUBLIC}")
        for path in (public_file(directory, name), secret_file(directory, name)):
            if path.exists():
                raise KeysError(f"{path} is there already: revoke {name} first, or take another name")
    if not public_file(directory, SCHEDULER).exists():
        raise KeysError(f"{directory} has no key of the scheduler: run `pagewise keys init` first")
    for name in names:
        _make(directory, name)


def _make(directory: Path, name: str) -> None:
    """A new pair: first the secret half, readable by its owner alone, then the public one, whole or not at all."""
    public = public_file(directory, name)
    public.parent.mkdir(parents=True, exist_ok=True)
    before = os.umask(0o077)
    try:
        secret_file(directory, name).parent.mkdir(exist_ok=True)
        made, _ = create_certificates(secret_file(directory, name).parent, name)
    finally:
        os.umask(before)
    unfinished = public.with_suffix(".new")
    unfinished.write_bytes(Path(made).read_bytes())
    unfinished.replace(public)
    print(f"{name} made: {secret_file(directory, name)} is its secret")


def _revoke(directory: Path, names: Sequence[str]) -> None:
    for name in names:
        if not _NAME.fullmatch(name) or not public_file(directory, name).exists():
            raise KeysError(f"there is no key {name!r} in {directory / PUBLIC}")
    for name in names:
        public_file(directory, name).unlink()
        secret = secret_file(directory, name)
        for path in (secret, secret.with_suffix(".key")):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # somebody else's files, or a mount
            secret.parent.rmdir()
        after = "; run `pagewise keys init`, then start the scheduler and all executors again"
        print(f"{name} revoked{after if name == SCHEDULER else ''}")


def _list(directory: Path) -> None:
    for path in sorted((directory / PUBLIC).glob("*.key")):
        here = "its secret is here too" if secret_file(directory, path.stem).exists() else ""
        print(f"{path.stem:<20} {load_certificate(path)[0].decode()}  {here}".rstrip())
