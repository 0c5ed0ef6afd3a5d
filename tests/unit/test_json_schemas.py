"""Answers that follow a JSON schema, and schemas that are refused."""

from __future__ import annotations

import json

import numpy as np
import pytest

from compute_node import embedded
from compute_node.text.grammar import Grammars
from compute_node.text.parsers.forced import forced_schema
from compute_node.text.schema_limits import check_schema
from compute_node.text.tokenizer import Tokenizer
from tierd.errors import LimitExceeded, TierdError, UsageError

VOCABULARY, END = 4096, 0
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}, "ok": {"type": "boolean"}},
    "required": ["name", "age", "ok"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer((embedded.path() / "tokenizer.json").read_bytes())


@pytest.fixture(scope="module")
def grammars(tokenizer):
    return Grammars(tokenizer, VOCABULARY, frozenset({END}))


def follow(constraint, seed, most=400):
    """Tokens drawn at random among those that are allowed."""
    draw = np.random.default_rng(seed)
    tokens = []
    while not constraint.finished and len(tokens) < most:
        allowed = np.flatnonzero(constraint.mask())
        token = int(draw.choice(allowed))
        if token == END:
            break
        constraint.advance(token)
        tokens.append(token)
    return tokens


@pytest.mark.parametrize("seed", range(8))
def test_any_tokens_that_are_allowed_make_a_text_that_follows_the_schema(grammars, tokenizer, seed):
    tokens = follow(grammars.compile(PERSON).begin(), seed)
    found = json.loads(tokenizer.decode(tokens))
    assert list(found) == ["name", "age", "ok"]
    assert [type(value) for value in found.values()] == [str, int, bool]


def test_an_answer_may_end_only_when_it_is_complete(grammars, tokenizer):
    constraint = grammars.compile(PERSON).begin()
    for token in tokenizer.encode('{"name": "Ann", "age": 3, "ok": true', special_tokens=False):
        assert constraint.mask()[token]
        assert not constraint.mask()[END]
        constraint.advance(token)
    assert not constraint.finished
    (brace,) = tokenizer.encode("}", special_tokens=False)
    constraint.advance(brace)
    assert constraint.finished or constraint.mask()[END]


def test_answers_of_one_grammar_go_their_own_ways(grammars):
    grammar = grammars.compile(PERSON)
    first, second = grammar.begin(), grammar.begin()
    follow(first, 1)
    assert not second.finished
    assert np.flatnonzero(second.mask()).size > 0


def test_a_constraint_may_begin_after_the_thoughts(grammars, tokenizer):
    (comma,) = tokenizer.encode(",", special_tokens=False)
    constraint = grammars.compile(PERSON).begin(after=comma)
    assert constraint.mask().sum() == VOCABULARY - 1
    constraint.advance(comma + 1)
    constraint.advance(comma)
    assert constraint.mask().sum() < 100


def test_a_token_that_is_not_allowed_is_an_error(grammars, tokenizer):
    constraint = grammars.compile(PERSON).begin()
    (wrong,) = tokenizer.encode("x", special_tokens=False)
    with pytest.raises(TierdError, match="grammar"):
        constraint.advance(wrong)


@pytest.mark.parametrize(
    ("schema", "error"),
    [
        ([], UsageError),
        ({"$ref": "https://example.org/schema.json"}, UsageError),
        ({"properties": {"a": {"$ref": "file:///etc/passwd"}}}, UsageError),
        ({"enum": ["x" * 70_000]}, LimitExceeded),
        ({"enum": list(range(5000))}, LimitExceeded),
        ({"type": "array", "maxItems": 10**9}, LimitExceeded),
        ({"pattern": "(a+)+" * 200}, LimitExceeded),
        ({"allOf": [{"pattern": f".*{number}.*"} for number in range(9)]}, LimitExceeded),
        ({"$defs": {str(n): {"pattern": str(n), "$ref": f"#/$defs/{n + 1}"} for n in range(9)}}, LimitExceeded),
    ],
)
def test_schemas_outside_the_bounds_are_refused(schema, error):
    with pytest.raises(error, match="the schema"):
        check_schema(schema, name="the schema")


def test_a_deep_schema_is_refused_before_anything_recurses():
    schema = {}
    for _ in range(5000):
        schema = {"items": schema}
    with pytest.raises(LimitExceeded, match="deeper"):
        check_schema(schema, name="the schema")


def test_tools_of_which_one_must_be_called_keep_their_own_definitions(grammars, tokenizer):
    one = {
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/t"}},
        "required": ["x"],
        "additionalProperties": False,
    }
    tools = {"a": one | {"$defs": {"t": {"const": 1}}}, "b": one | {"$defs": {"t": {"const": 2}}}}
    grammar = grammars.compile(check_schema(forced_schema(tools), name="the schema"))
    for text, fits in (
        ('{"name": "a", "arguments": {"x": 1}}', True),
        ('{"name": "b", "arguments": {"x": 2}}', True),
        ('{"name": "b", "arguments": {"x": 1}}', False),
    ):
        constraint, followed = grammar.begin(), True
        for token in tokenizer.encode(text, special_tokens=False):
            followed = followed and bool(constraint.mask()[token])
            if followed:
                constraint.advance(token)
        assert followed == fits


def test_many_patterns_are_fine_where_no_text_has_to_follow_several(grammars):
    named = {f"p{number}": {"description": "a day", "$ref": "#/$defs/day"} for number in range(20)}
    free = {f"q{number}": {"type": "string", "pattern": f"^{number}+$"} for number in range(20)}
    days = {"day": {"type": "string", "format": "date", "allOf": []}}
    schema = {"type": "object", "properties": named | free, "$defs": {"day": {"type": "string", "format": "date"}}}
    assert not grammars.compile(check_schema(schema, name="the schema")).begin().finished
    with pytest.raises(LimitExceeded, match="allOf"):
        check_schema(schema | {"$defs": days}, name="the schema")


def test_a_property_may_bear_the_name_of_a_keyword():
    schema = {"properties": {"$ref": {"type": "string"}, "pattern": {"type": "string"}}}
    assert check_schema(schema, name="the schema") == schema


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nothing"},
        {"$ref": "#/$defs/missing"},
        {"type": "string", "pattern": "(" * 50},
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
        {"type": "integer", "minimum": 10**400},
        {"$defs": {"itself": {"anyOf": [{"$ref": "#/$defs/itself"}]}}, "$ref": "#/$defs/itself"},
    ],
)
def test_schemas_that_cannot_be_followed_are_refused(grammars, schema):
    with pytest.raises(UsageError, match=r"cannot be followed|no answer can follow"):
        grammars.compile(check_schema(schema, name="the schema"))


def test_a_schema_that_refers_to_itself_is_followed(grammars, tokenizer):
    schema = {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
                "required": ["next"],
                "additionalProperties": False,
            }
        },
    }
    constraint = grammars.compile(schema).begin()
    for token in tokenizer.encode('{"next": {"next": null}}', special_tokens=False):
        assert constraint.mask()[token]
        constraint.advance(token)
