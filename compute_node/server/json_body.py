"""Bodies of requests: the JSON that they must be, and how little of what is wrong with one is looked for.

Reading one holds the event loop, and the interpreter. Text is read at 150 MB/s, so that a bound on its bytes is enough;
each field and each list of a body costs half a microsecond and more, so that there is a bound on these as well.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Coroutine
from typing import Any, Final, NoReturn

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict
from starlette.responses import Response

from compute_node.server.problem import Problem

__all__ = ["JsonFields", "JsonRoute", "parse_body"]

MAX_FIELDS: Final = 1 << 17
"""Fields, objects and lists of a body together; 4096 messages, each with a call of a tool, have a quarter of them."""

_MAX_QUOTES: Final = 4 * MAX_FIELDS

_HALF: Final = re.compile(rb"\\u[dD][89a-fA-F]")
"""The escape of half a character, alone or with its other half."""


class JsonFields(BaseModel):
    """An object of a body. Its fields have the types that JSON gives them: neither "5" nor true is a number."""

    model_config = ConfigDict(strict=True)


class JsonRoute(APIRoute):
    """A path whose body is read by `parse_body`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's, with another request."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(_JsonRequest(request.scope, request.receive))

        return handle


class _JsonRequest(Request):
    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            self._json = parse_body(await self.body())
        return self._json


def parse_body(data: bytes) -> Any:
    """The value of a body.

    What text and numbers cannot hold is refused here: pydantic would list each of a million such places.

    Raises:
        json.JSONDecodeError: it is not JSON; FastAPI tells the place.
        Problem: it is, or nearly, but holds what cannot be used, or too much of it.
    """
    if _fields(data) > MAX_FIELDS and _fields(_without_strings(data)) > MAX_FIELDS:
        raise Problem(400, f"the body holds more than {MAX_FIELDS} fields, objects and lists")
    try:
        value = json.loads(data, parse_constant=_refuse)
        if _HALF.search(data):
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError:
        raise
    except UnicodeDecodeError as error:
        raise Problem(400, f"the body is not UTF-8: see byte {error.start}") from None
    except UnicodeEncodeError:
        raise Problem(400, "the body holds half of a surrogate pair, which is no character") from None
    except RecursionError:
        raise Problem(400, "the body is nested too deeply") from None
    except ValueError:
        raise Problem(400, "the body holds an integer of thousands of digits") from None
    return value


def _fields(data: bytes) -> int:
    """Fields, objects and lists of JSON, and what looks like some in its strings."""
    return data.count(b":") + data.count(b"{") + data.count(b"[")


def _without_strings(data: bytes) -> bytes:
    """JSON without its strings, but for those behind so many that it is refused anyway."""
    quotes = data.replace(rb"\\", b"").replace(rb"\"", b"")
    return b"".join(quotes.split(b'"', _MAX_QUOTES)[::2])


def _refuse(constant: str) -> NoReturn:
    raise Problem(400, f"the body is not JSON: {constant} is no number of JSON")
