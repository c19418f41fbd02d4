"""Which version of Pagewise this is."""

from importlib.metadata import PackageNotFoundError, version


def package_version() -> str:
    """The version of Pagewise that runs; "0+unknown" from a source tree that is not installed."""
    try:
        return version("pagewise")
    except PackageNotFoundError:
        return "0+unknown"
