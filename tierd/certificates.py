"""A server's certificates, read again when their files change: they can be renewed without a restart."""

from __future__ import annotations

import ssl
from pathlib import Path

import grpc
import structlog

from tierd.access import read_pem
from tierd.errors import UsageError

__all__ = ["Certificates"]

_log = structlog.get_logger()


class Certificates:
    """Certificate, key and, where clients must have certificates too, their authorities.

    gRPC asks at each handshake whether they have changed. Files that do not fit each other, as in the middle of a
    renewal, are left for the next handshake; the last good ones hold meanwhile.

    Args:
        certificate: PEM file.
        key: PEM file.
        client_ca: PEM file of the authorities of clients; None: clients need no certificate.

    Raises:
        UsageError: a file cannot be read, or the key is not that of the certificate.
    """

    def __init__(self, certificate: Path, key: Path, client_ca: Path | None = None) -> None:
        self._certificate, self._key, self._client_ca = certificate, key, client_ca
        self._stamp = self._stamps()
        self._first = self._read()

    def credentials(self) -> grpc.ServerCredentials:
        """For a port of a server; the certificates must live as long as it."""
        return grpc.dynamic_ssl_server_credentials(
            self._first,
            self._changed,  # type: ignore[arg-type]  # None goes on with the last ones, its stub does not know
            require_client_authentication=self._client_ca is not None,
        )

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC, on a thread of its own: the new ones, or None to go on with the last."""
        stamp = self._stamps()
        if stamp == self._stamp:
            return None
        try:
            fresh = self._read()
        except UsageError as error:
            _log.warning("certificates were not read again; the last ones hold", why=error.message)
            return None
        self._stamp = stamp
        _log.info("certificates were read again", certificate=str(self._certificate))
        return fresh

    def _read(self) -> grpc.ServerCertificateConfiguration:
        chain, key = read_pem(self._certificate, "--tls-cert"), read_pem(self._key, "--tls-key")
        roots = None if self._client_ca is None else read_pem(self._client_ca, "--tls-client-ca")
        try:
            # gRPC would say only at a handshake, and to nobody, that they do not belong together.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self._certificate, self._key, password="")
        except (ssl.SSLError, OSError) as error:
            raise UsageError(
                f"--tls-cert: {self._certificate} and the key {self._key} cannot be used together: {error}",
                hint="Both must be PEM files, and the key without a password.",
            ) from error
        return grpc.ssl_server_certificate_configuration([(key, chain)], root_certificates=roots)

    def _stamps(self) -> tuple[tuple[int, int], ...]:
        stamps = []
        for path in (self._certificate, self._key, self._client_ca):
            if path is not None:
                try:
                    facts = path.stat()
                except OSError:
                    continue
                stamps.append((facts.st_mtime_ns, facts.st_size))
        return tuple(stamps)
