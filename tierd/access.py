"""What a node shows to daemons and workers of other hosts, and how it knows that they are the right ones."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio

from tierd.addresses import Address
from tierd.errors import UsageError
from tierd.rpc import CHANNEL_OPTIONS
from tierd.small_files import read_at_most

__all__ = ["LOCAL_ACCESS", "TOKEN_HEADER", "Access", "read_pem", "read_tokens"]

TOKEN_HEADER = "authorization"  # noqa: S105 - the header's name, no secret
_MAX_FILE_BYTES = 1 << 20
_TOKEN_LENGTHS = (16, 512)
_SPREAD: list[tuple[str, int | str]] = [
    # Each call goes to the next of those that can be reached; a session stays with the one that it began with.
    ("grpc.service_config", json.dumps({"loadBalancingConfig": [{"round_robin": {}}]})),
    # A name is looked up again when the peers that it stood for are gone.
    ("grpc.dns_min_time_between_resolutions_ms", 2000),
]


@dataclass(frozen=True, slots=True)
class Access:
    """How to reach a peer. Unix sockets need none of it.

    A peer of another host is spoken to in TLS, and shown the token; one of this host in plain text unless `ca` says
    otherwise.

    Attributes:
        ca: PEM file of the authorities that sign the peers' certificates; None: those that gRPC brings along.
        certificate: PEM file of this node's own certificate, for peers that want to see one.
        key: PEM file of its key.
        token_file: the first line of this file is shown to every peer.
        plaintext: speak plain text with other hosts, too, where whoever listens can read everything.
        name: that the peers' certificates must have, where that is not the host's own name or number.
    """

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    token_file: Path | None = None
    plaintext: bool = False
    name: str = ""

    def channel(self, address: Address) -> grpc.aio.Channel:
        """A channel to a peer; it connects when it is used.

        Raises:
            UsageError: a file cannot be read, or a certificate goes without its key.
        """
        if (self.certificate is None) != (self.key is None):
            raise UsageError("--tls-client-cert and --tls-client-key go together")
        options = [*CHANNEL_OPTIONS, *(_SPREAD if address.several else [])]
        if address.path is not None or self.plaintext or (address.local and self.ca is None):
            return grpc.aio.insecure_channel(address.target, options=options)
        credentials = grpc.ssl_channel_credentials(
            root_certificates=None if self.ca is None else read_pem(self.ca, "--tls-ca"),
            certificate_chain=None if self.certificate is None else read_pem(self.certificate, "--tls-client-cert"),
            private_key=None if self.key is None else read_pem(self.key, "--tls-client-key"),
        )
        if self.name:
            options.append(("grpc.ssl_target_name_override", self.name))
        return grpc.aio.secure_channel(address.target, credentials, options=options)

    def metadata(self, address: Address) -> tuple[tuple[str, str], ...]:
        """What is sent with every call: the token, if there is one and the peer may see it."""
        if self.token_file is None or address.path is not None:
            return ()
        return ((TOKEN_HEADER, f"Bearer {read_tokens(self.token_file)[0]}"),)


LOCAL_ACCESS = Access()
"""For peers of this host."""


def read_pem(path: Path, option: str) -> bytes:
    """A certificate or key file; UsageError naming `option` if it cannot be read."""
    try:
        data = read_at_most(path, _MAX_FILE_BYTES)
    except OSError as error:
        raise UsageError(f"{option}: {path} cannot be read: {error.strerror}") from error
    if b"-----BEGIN " not in data:
        raise UsageError(f"{option}: {path} is no PEM file")
    return data


def read_tokens(path: Path) -> list[str]:
    """The tokens of a file, one a line; empty lines and those that begin with # do not count.

    Raises:
        UsageError: it cannot be read, holds none, or one that is too short, too long or not plain ASCII.
    """
    try:
        text = read_at_most(path, _MAX_FILE_BYTES).decode("ascii")
    except OSError as error:
        raise UsageError(f"--token-file: {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise UsageError(f"--token-file: {path} holds something else than plain ASCII") from None
    tokens = [line for line in map(str.strip, text.splitlines()) if line and not line.startswith("#")]
    least, most = _TOKEN_LENGTHS
    if not tokens or not all(least <= len(token) <= most and token.isprintable() for token in tokens):
        raise UsageError(
            f"--token-file: {path} must hold tokens of {least} to {most} characters, one a line",
            hint=f"Make one: openssl rand -hex 32 > {path}",
        )
    return tokens
