"""Who may ask: Host and Origin checks against other sites' pages, the allow-list for CORS, and API keys.

A page on a name that resolves to this host could read us through its visitor's browser (DNS rebinding); its requests
carry that name as Host. A page of another site that sends requests here carries its Origin.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import socket
from collections.abc import Iterable
from typing import Final

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from compute_node.server.problem import Problem

__all__ = ["ApiKeys", "Guard", "HostNames"]

_HOST: Final = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,255})(?::[0-9]{1,5})?")
_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})
_METHODS: Final = "GET, POST, OPTIONS"
_ALLOWED_HEADERS: Final = "authorization, content-type, x-api-key, anthropic-version, anthropic-beta"
_OPEN_PATHS: Final = frozenset({"/", "/health"})
_OPEN_FOLDER: Final = "/page/"


class HostNames:
    """By which names this server may be called.

    Args:
        extra: names that the operator allows, such as that of a proxy.
        loopback: only this host can connect. Otherwise any address and this host's own name are allowed too: a page
            that rebinds needs a name.
    """

    def __init__(self, extra: Iterable[str], *, loopback: bool) -> None:
        self._names = _LOOPBACK | {name.lower() for name in extra}
        self._loopback = loopback
        if not loopback:
            self._names |= {socket.gethostname().lower()}

    def allow(self, host: str) -> bool:
        """Whether a Host header names this server."""
        match = _HOST.fullmatch(host)
        if match is None:
            return False
        name = match[1].strip("[]").lower()
        return name in self._names or (not self._loopback and _is_address(name))


class ApiKeys:
    """Keys that open the API; without any, everyone who can connect may use it.

    Only digests are kept, and all are compared in constant time.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def allow(self, headers: Headers) -> bool:
        """Whether a request carries a key, as OpenAI's clients send it or as Anthropic's do."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        digest = _digest(given)
        found = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(found)


class Guard:
    """Refuses what should not come through.

    Args:
        app: what is guarded.
        hosts: names of this server.
        origins: other sites whose pages may use the API.
        keys: that open it.
    """

    def __init__(self, app: ASGIApp, *, hosts: HostNames, origins: Iterable[str], keys: ApiKeys) -> None:
        self._app = app
        self._hosts = hosts
        self._origins = frozenset(origin.rstrip("/") for origin in origins)
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets a request through or answers it here."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        shared = origin is not None and origin in self._origins
        reply = _cors_sender(send, origin) if shared and origin is not None else send
        try:
            if self._check(scope, headers, origin, shared=shared):
                await self._app(scope, receive, reply)
            else:
                await _preflight()(scope, receive, reply)
        except Problem as problem:
            await problem.response(scope["path"])(scope, receive, reply)

    def _check(self, scope: Scope, headers: Headers, origin: str | None, *, shared: bool) -> bool:
        """False for a browser's question whether it may ask; Problem if something must not come through."""
        host = headers.get("host", "")
        if not self._hosts.allow(host):
            raise Problem(403, f"the host {host[:80]!r} is not served here; see --allowed-host", code="wrong_host")
        if origin is not None and not shared and origin != f"{scope['scheme']}://{host}":
            raise Problem(403, "requests of other sites' pages are refused; see --cors", code="wrong_origin")
        if shared and scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            return False
        path = scope["path"]
        is_open = path in _OPEN_PATHS or path.startswith(_OPEN_FOLDER)
        if self._keys and not is_open and not self._keys.allow(headers):
            raise Problem(
                401,
                "no valid API key: send it as `Authorization: Bearer KEY` or as `x-api-key: KEY`",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return True


def _preflight() -> Response:
    return Response(
        status_code=204,
        headers={
            "Access-Control-Allow-Methods": _METHODS,
            "Access-Control-Allow-Headers": _ALLOWED_HEADERS,
            "Access-Control-Max-Age": "600",
        },
    )


def _cors_sender(send: Send, origin: str) -> Send:
    """Tells the browser that this site's page may read the answer."""

    async def reply(message: Message) -> None:
        if message["type"] == "http.response.start":
            added = [(b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"Origin")]
            message = {**message, "headers": [*message.get("headers", []), *added]}
        await send(message)

    return reply


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
