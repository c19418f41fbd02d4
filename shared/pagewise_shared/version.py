"""The version of Pagewise."""

from importlib.metadata import PackageNotFoundError, version


def package_version() -> str:
    """Return the version of Pagewise that runs, "0+unknown" in a source tree that is not installed."""
    try:
        return version("pagewise")
    except PackageNotFoundError:
        return "0+unknown"
