"""The application: which path leads where, and what becomes of errors."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Final

from fastapi import Body, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from compute_node.server.body_limit import BodyLimit
from compute_node.server.chat import answer_chat
from compute_node.server.chat_request import ChatRequest
from compute_node.server.completions import CompletionRequest, Ids, answer_completion
from compute_node.server.guard import ApiKeys, Guard, HostNames
from compute_node.server.json_body import JsonFields, JsonRoute
from compute_node.server.messages import answer_message, count_tokens
from compute_node.server.messages_request import CountRequest, MessagesRequest
from compute_node.server.metrics import NodeMetrics
from compute_node.server.page_files import page_routes
from compute_node.server.problem import Problem, json_bytes
from compute_node.server.service import Service
from tierd import __version__
from tierd.errors import TierdError

__all__ = ["AccessRules", "make_app"]

_EXPOSITION: Final = "text/plain; version=0.0.4; charset=utf-8"
_MAX_REPORTED: Final = 20
_ENDPOINTS: Final = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/messages": "messages",
    "/v1/messages/count_tokens": "tokens",
    "/tokenize": "tokens",
    "/detokenize": "tokens",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessRules:
    """Who may ask, and how much.

    Attributes:
        hosts: names of this server.
        keys: that open it.
        origins: other sites whose pages may use it.
        max_body: bytes of a request's body.
        body_seconds: bound on the time that a body takes.
    """

    hosts: HostNames
    keys: ApiKeys
    origins: tuple[str, ...] = ()
    max_body: int = 8 << 20
    body_seconds: float = 60.0


class TokenizeRequest(JsonFields):
    """The body of a request to /tokenize."""

    text: str
    add_special_tokens: bool = True


class DetokenizeRequest(JsonFields):
    """The body of a request to /detokenize."""

    tokens: Ids | Annotated[list[int], Field(max_length=0)]
    skip_special_tokens: bool = False


class _ErrorBody(BaseModel):
    """An error in OpenAI's form; under /v1/messages in Anthropic's."""

    error: dict[str, Any]


_RESPONSES: Final[dict[int | str, dict[str, Any]]] = {
    status: {"model": _ErrorBody, "description": text}
    for status, text in (
        (400, "The request cannot be served as it is."),
        (401, "No valid API key."),
        (403, "A host or an origin that is not allowed."),
        (404, "Another model is served, or there is no such path."),
        (408, "The body did not come in time."),
        (413, "The body is too large."),
        (429, "Too many requests wait; Retry-After says when to come back."),
        (503, "The daemon is gone, or the server is stopping."),
        (504, "The answer took longer than it may."),
    )
}


def make_app(service: Service, rules: AccessRules) -> ASGIApp:
    """The whole application, guarded and counted."""
    app = FastAPI(
        title="compute-node",
        version=__version__,
        summary="Chat, completions and messages of one model, in the forms of OpenAI and Anthropic.",
        docs_url=None,
        redoc_url=None,
        responses=_RESPONSES,
        routes=[*page_routes()],
    )
    app.router.route_class = JsonRoute
    _add_generation(app, service)
    _add_facts(app, service)
    _add_errors(app)
    limited = BodyLimit(app, max_bytes=rules.max_body, seconds=rules.body_seconds)
    guarded = Guard(limited, hosts=rules.hosts, origins=rules.origins, keys=rules.keys)
    return _Counted(guarded, service.metrics)


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions", tags=["OpenAI"])
    async def chat_completions(body: Annotated[ChatRequest, Body()]) -> Response:
        """Answers a conversation, whole or as server-sent events."""
        return await answer_chat(service, body)

    @app.post("/v1/completions", tags=["OpenAI"])
    async def completions(body: Annotated[CompletionRequest, Body()]) -> Response:
        """Continues texts or rows of token ids."""
        return await answer_completion(service, body)

    @app.post("/v1/messages", tags=["Anthropic"])
    async def messages(body: Annotated[MessagesRequest, Body()]) -> Response:
        """Answers a conversation in Anthropic's form."""
        return await answer_message(service, body)

    @app.post("/v1/messages/count_tokens", tags=["Anthropic"])
    async def count(body: Annotated[CountRequest, Body()]) -> Response:
        """Counts the tokens of a conversation's prompt."""
        return _json({"input_tokens": await count_tokens(service, body)})


def _add_facts(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models", tags=["OpenAI"])
    async def models() -> Response:
        """The names of the model that is served."""
        return _json({"object": "list", "data": [_model(service, name) for name in service.names]})

    @app.get("/v1/models/{name:path}", tags=["OpenAI"])
    async def model(name: str) -> Response:
        """One of them."""
        service.check_model(name)
        return _json(_model(service, name))

    @app.post("/tokenize", tags=["Tokens"])
    async def tokenize(body: Annotated[TokenizeRequest, Body()]) -> Response:
        """Token ids of a text."""
        tokens = await service.elsewhere(
            service.tokens_of, body.text, special_tokens=body.add_special_tokens, most=service.most_counted
        )
        return _json({"tokens": tokens, "count": len(tokens), "max_model_len": service.context})

    @app.post("/detokenize", tags=["Tokens"])
    async def detokenize(body: Annotated[DetokenizeRequest, Body()]) -> Response:
        """Text of token ids."""
        tokenizer = service.text_parts()
        if max(body.tokens, default=0) >= service.vocabulary:
            raise Problem(400, f"there are token ids of {service.vocabulary} or more", param="tokens")
        decode: Callable[..., str] = tokenizer.decode
        text = await service.elsewhere(decode, body.tokens, skip_special=body.skip_special_tokens)
        return _json({"text": text})

    @app.get("/health", tags=["Server"])
    async def health() -> Response:
        """How many requests run and wait."""
        stats = service.engine.stats()
        return _json(
            {
                "status": "ok",
                "model": service.name,
                "running": stats.running,
                "waiting": stats.waiting,
                "refused": stats.refused,
                "ended": dict(stats.finished),
            }
        )

    @app.get("/metrics", tags=["Server"])
    async def metrics() -> Response:
        """Metrics for Prometheus."""
        return Response(service.metrics.exposition(), media_type=_EXPOSITION)


def _add_errors(app: FastAPI) -> None:
    reported = 0

    async def problem(request: Request, error: Exception) -> Response:
        found = error if isinstance(error, Problem) else error.__cause__
        if isinstance(found, Problem):
            return found.response(request.url.path)
        assert isinstance(error, HTTPException)
        return Problem(error.status_code, str(error.detail), headers=error.headers).response(request.url.path)

    async def ours(request: Request, error: Exception) -> Response:
        assert isinstance(error, TierdError)
        return Problem.of(error).response(request.url.path)

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        # Of a value that may be of several kinds, the kind that fits furthest is meant.
        errors = error.errors()
        first = max((one for one in errors if one["loc"][:2] == errors[0]["loc"][:2]), key=lambda one: len(one["loc"]))
        place = ".".join(str(part) for part in first["loc"] if part != "body")[:200]
        message = f"{place}: {first['msg']}" if place else str(first["msg"])
        if first["type"] == "json_invalid":
            place, message = "", f"the body is not JSON: {first['ctx']['error']} at character {first['loc'][-1]}"
        kind = request.headers.get("content-type", "")
        if "json" not in kind:
            message = f"the body must be JSON, sent with Content-Type: application/json (it came as {kind[:80]!r})"
        return Problem(400, message, param=place or None).response(request.url.path)

    async def defect(request: Request, error: Exception) -> Response:
        nonlocal reported
        if reported < _MAX_REPORTED:
            reported += 1
            print(f"compute-node: a request to {request.url.path[:200]} met a defect:", file=sys.stderr)
            traceback.print_exception(error)
        return Problem(500, f"unexpected {type(error).__name__}; this is a defect").response(request.url.path)

    app.add_exception_handler(Problem, problem)
    app.add_exception_handler(HTTPException, problem)
    app.add_exception_handler(TierdError, ours)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(Exception, defect)


class _Counted:
    """Counts answers by endpoint and class of status."""

    def __init__(self, app: ASGIApp, metrics: NodeMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request through."""

        async def note(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.answered(_ENDPOINTS.get(scope["path"], "other"), message["status"])
            await send(message)

        await self._app(scope, receive, note if scope["type"] == "http" else send)


def _json(content: Any) -> Response:
    return Response(json_bytes(content), media_type="application/json")


def _model(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.started,
        "owned_by": "compute-node",
        "max_model_len": service.context,
        "about": service.about,
    }
