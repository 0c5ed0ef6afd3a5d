"""Requests made of the OpenAPI file: none of them finds a defect."""

from __future__ import annotations

import hypothesis
import pytest
import schemathesis
from api_server import served
from schemathesis.checks import not_a_server_error

WHAT = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
)


@pytest.fixture(scope="module")
def described(embedded_store):
    with served(embedded_store, node={"context": 64, "max_tokens": 3}) as model:
        yield schemathesis.openapi.from_url(f"{model.url}/openapi.json")


def test_every_endpoint_is_described(described):
    assert {*WHAT, "/v1/models", "/v1/models/{name}", "/health", "/metrics"} <= set(described.raw_schema["paths"])


@pytest.mark.parametrize("path", WHAT)
def test_made_up_requests_find_no_defect(described, path):
    statuses = set()

    @hypothesis.settings(
        max_examples=8,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=described[path]["POST"].as_strategy())
    def ask(case):
        answer = case.call(timeout=60)
        case.validate_response(answer, checks=[not_a_server_error])
        statuses.add(answer.status_code)

    ask()
    assert statuses <= {200, 400, 404, 413, 429}
