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

    If changed files cannot be read or do not belong together, the certificate stays as it was, which is logged and
    counted. ``context``: the TLS context of a listening socket. New connections get the newest certificate, and open
    ones keep theirs.
    """

    def __init__(self, certfile: str, keyfile: str | None, metrics: Metrics) -> None:
        """Read the files.

        Raises:
            ConfigError: they cannot be read, or do not belong together.
        """
        self._certfile, self._keyfile = certfile, keyfile
        self._metrics = metrics
        self._files = WatchedFiles([Path(file) for file in (certfile, keyfile) if file])
        self._newest = self.context = self._load()
        self.context.sni_callback = self._choose

    def _choose(self, connection: ssl.SSLSocket | ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        """Give a connection, in its handshake, the newest certificate."""
        if self._files.changed():
            try:
                self._newest = self._load()
            except ConfigError as error:
                self._metrics.certificate_reloads("failed").inc()
                log.error("the TLS certificate stays as it was: %s", error)
            else:
                self._metrics.certificate_reloads("done").inc()
                log.info("TLS certificate read again from %s", self._certfile)
        connection.context = self._newest

    def _load(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.set_alpn_protocols(["http/1.1"])
        try:
            # Without this password, OpenSSL would ask for that of an encrypted key on the terminal, and block.
            context.load_cert_chain(self._certfile, self._keyfile, password=lambda: b"")
        except (OSError, ValueError) as error:  # also ssl.SSLError
            files = self._certfile if self._keyfile is None else f"{self._certfile} and {self._keyfile}"
            raise ConfigError(f"{files} cannot be used as a TLS certificate: {error}") from error
        return context


def load_certificate(certfile: str | None, keyfile: str | None, metrics: Metrics) -> Certificate | None:
    """Return the certificate that the options name, or None if they name none: HTTP is not encrypted then.

    Raises:
        ConfigError: there is a key without a certificate, or the files cannot be used.
    """
    if certfile is None:
        if keyfile is not None:
            raise ConfigError("--ssl-keyfile needs --ssl-certfile")
        return None
    return Certificate(certfile, keyfile, metrics)
