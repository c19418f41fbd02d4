"""TLS with a certificate that is read again when its files change, so that renewing it needs no restart."""

import logging
import ssl
from pathlib import Path

from pagewise_shared.errors import ConfigError

from pagewise_gateway.http.watched_files import WatchedFiles
from pagewise_gateway.metrics import Metrics

log = logging.getLogger(__name__)


class Certificate:
    """A server's certificate chain and private key, in two files or in one.

    Files that cannot be read, or do not fit together, leave the certificate as it was: that is logged, and counted.
    """

    def __init__(self, certfile: str, keyfile: str | None, metrics: Metrics) -> None:
        """Read them.

        Raises:
            ConfigError: they cannot be read, or do not fit together.
        """
        self._certfile, self._keyfile = certfile, keyfile
        self._metrics = metrics
        self._files = WatchedFiles([Path(file) for file in (certfile, keyfile) if file])
        self._context = self._load()

    def context(self) -> ssl.SSLContext:
        """What a new connection is secured with. Those that are open keep what they have."""
        if self._files.changed():
            try:
                self._context = self._load()
            except ConfigError as error:
                self._metrics.certificate_reloads("failed").inc()
                log.error("the TLS certificate stays as it was: %s", error)
            else:
                self._metrics.certificate_reloads("done").inc()
                log.info("TLS certificate read again from %s", self._certfile)
        return self._context

    def _load(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.set_alpn_protocols(["http/1.1"])
        try:
            # Asking for a password on a terminal would hold up the whole service.
            context.load_cert_chain(self._certfile, self._keyfile, password=lambda: b"")
        except (OSError, ValueError) as error:  # also ssl.SSLError
            files = self._certfile if self._keyfile is None else f"{self._certfile} and {self._keyfile}"
            raise ConfigError(f"{files} cannot be used as a TLS certificate: {error}") from error
        return context


def load_certificate(certfile: str | None, keyfile: str | None, metrics: Metrics) -> Certificate | None:
    """The certificate that the options name; None: they name none, and HTTP is plain.

    Raises:
        ConfigError: there is a key without a certificate, or they cannot be used.
    """
    if certfile is None:
        if keyfile is not None:
            raise ConfigError("--ssl-keyfile needs --ssl-certfile")
        return None
    return Certificate(certfile, keyfile, metrics)
