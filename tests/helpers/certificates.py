"""Self-signed certificates for 127.0.0.1."""

from __future__ import annotations

import subprocess
from pathlib import Path


def make_certificate(folder: Path, name: str = "cert", password: str | None = None) -> tuple[str, str]:
    """Returns the files of a certificate, which is its own authority, and of its key."""
    cert, key = folder / f"{name}.pem", folder / f"{name}-key.pem"
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
                    *(["-nodes"] if password is None else ["-passout", f"pass:{password}"]), "-keyout", key, "-out",
                    cert, "-days", "2", "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"],
                   check=True, capture_output=True)
    return str(cert), str(key)
