"""What a client is told when something does not work: OpenAI's form, and Anthropic's under /v1/messages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from starlette.responses import Response

from compute_node.serving.requests import QueueFull
from tierd.errors import DaemonUnavailable, DeadlineExceeded, LimitExceeded, TierdError, UsageError

__all__ = ["ANTHROPIC_PATH", "Problem", "json_bytes"]

ANTHROPIC_PATH: Final = "/v1/messages"

_OPENAI: Final = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_ANTHROPIC: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def json_bytes(content: Any) -> bytes:
    """JSON as UTF-8; a lone surrogate, which UTF-8 cannot hold, becomes a question mark."""
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


class Problem(Exception):
    """A request that is refused or has failed.

    Args:
        status: HTTP status.
        message: what is wrong and what to do.
        code: OpenAI's short name of it.
        param: field of the request that it is about.
        headers: to send with it.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    @classmethod
    def of(cls, error: TierdError) -> Problem:
        """The status that says whose fault it is: the request's, the moment's, or ours."""
        message = f"{error.message} {error.hint}".strip()
        if isinstance(error, QueueFull):
            wait = str(int(error.retry_after_seconds))
            return cls(429, message, code="queue_full", headers={"Retry-After": wait})
        if isinstance(error, LimitExceeded):
            return cls(400, message, code="context_length_exceeded" if "context" in message else "limit_exceeded")
        if isinstance(error, UsageError):
            return cls(400, message)
        if isinstance(error, DaemonUnavailable):
            return cls(503, message, code="daemon_unavailable", headers={"Retry-After": "5"})
        if isinstance(error, DeadlineExceeded):
            return cls(504, message, code="deadline_exceeded")
        return cls(500, message, code=type(error).__name__)

    def as_object(self, *, anthropic: bool) -> dict[str, Any]:
        """The JSON body."""
        server = self.status >= 500
        if anthropic:
            kind = _ANTHROPIC.get(self.status, "api_error" if server else "invalid_request_error")
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        kind = _OPENAI.get(self.status, "server_error" if server else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self, path: str) -> Response:
        """As an answer to a request of `path`."""
        body = json_bytes(self.as_object(anthropic=path.startswith(ANTHROPIC_PATH)))
        return Response(body, self.status, headers=self.headers, media_type="application/json")
