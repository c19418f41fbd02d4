"""Asks a gateway that this machine started whether it answers."""

import http.client
import ssl
import urllib.request

# Made once, and without the certificates of authorities: ``ssl.create_default_context`` reads a file of them, which
# takes 30 ms. A server that starts is asked many times, on the cores on which it starts.
_UNVERIFIED = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
_UNVERIFIED.check_hostname = False  # the certificate is for the name that clients use, not for this address
_UNVERIFIED.verify_mode = ssl.CERT_NONE


def text_of(url: str, key: str = "") -> str | None:
    """Return what a GET of ``url`` brings within two seconds, sent with an API key if there is one; None: no 200."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=2, context=_UNVERIFIED) as answer:  # noqa: S310  # nosec B310 # our own server
            return str(answer.read().decode()) if answer.status == 200 else None
    except (OSError, http.client.HTTPException):
        return None


def answers(url: str) -> bool:
    """Return whether a GET of ``url`` is answered with 200 within two seconds. Certificates are not verified."""
    return text_of(url) is not None
