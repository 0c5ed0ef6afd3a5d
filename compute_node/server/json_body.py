"""Bodies of requests: the JSON that they must be, and how little of what is wrong with one is looked for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Coroutine
from typing import Any, Final, NoReturn

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from compute_node.server.problem import Problem

__all__ = ["JsonRoute", "parse_body"]

_HALF: Final = re.compile(rb"\\u[dD][89a-fA-F]")
"""The escape of half a character, alone or with its other half."""


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
        Problem: it is, or nearly, but holds what cannot be used.
    """
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


def _refuse(constant: str) -> NoReturn:
    raise Problem(400, f"the body is not JSON: {constant} is no number of JSON")
