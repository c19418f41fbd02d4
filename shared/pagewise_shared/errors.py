"""Errors that several packages raise or handle.

PagewiseError
├── ConfigError      an option or environment variable is unusable
├── ModelError       a model cannot be found, read or run
│   └── AdapterError             nor an adapter of it
│       └── AdapterNotFoundError
├── ProtocolError    bytes on the wire do not follow the protocol
└── RefusedError     the scheduler does not let a gateway or an executor join
"""


class PagewiseError(Exception):
    """Base of every error Pagewise raises on purpose; its text is written for the person who reads it."""


class ConfigError(PagewiseError):
    """An option or environment variable is unusable; the text names it."""


class ModelError(PagewiseError):
    """A model directory, GGUF file or hub id cannot be found, read or run; the text names the file or the reason."""


class AdapterError(ModelError):
    """An adapter cannot be found, read or served; the text names it and the reason."""


class AdapterNotFoundError(AdapterError):
    """There is no adapter in that folder, or under that hub id."""


class ProtocolError(PagewiseError):
    """A frame on the wire cannot be decoded, or speaks another protocol version."""


class RefusedError(PagewiseError):
    """The scheduler does not let this gateway or executor join; the text has the scheduler's reason."""
