"""The types of option values, and how an option is described."""

from typing import Annotated

from msgspec import Meta


def described(text: str, metavar: str | None = None, more: str = "") -> Meta:
    """The help text of an option. ``more``: sentences that only the documents add to it."""
    return Meta(description=text, extra={"metavar": metavar, "more": more})


Port = Annotated[int, Meta(ge=0, le=65535)]
Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]
