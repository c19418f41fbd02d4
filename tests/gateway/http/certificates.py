"""Self-signed certificates for tests."""

import subprocess
from pathlib import Path


def write_certificate(directory: Path, name: str) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 with that common name, and its key."""
    certificate, key = directory / f"{name}.pem", directory / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(key), "-out", str(certificate), "-days", "2", "-subj", f"/CN={name}"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key
