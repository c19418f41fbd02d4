"""Requests for structured output: their submissions, and refusals."""

from typing import Any

import pytest
from pagewise_shared.sampling import token_constraints

from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.server import MODEL, Server, serving

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
EOS = 0


async def ask(server: Server, path: str = COMPLETION, **fields: Any) -> tuple[int, dict[str, Any]]:
    given = {"messages": MESSAGES} if path == CHAT else {"prompt": "hi"}
    status, answer = await server.post(path, {"model": MODEL, "max_tokens": 3, **given, **fields})
    return status, answer


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_grammars_arrive(path: str) -> None:
    tag = {"structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}], "triggers": ["<f"]}
    wanted = [
        ({"response_format": {"type": "text"}}, None, ""),
        ({"response_format": {"type": "json_object"}}, "json_object", '"type":"object"'),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": SCHEMA, "strict": True},
                }
            },
            "json",
            '"required":["a"]',
        ),
        ({"response_format": {"type": "structural_tag"} | tag}, "structural_tag", '"<f"'),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, "json", '"required":["a"]'),
        ({"structured_outputs": {"json": '{"type": "null"}'}}, "json", '"null"'),
        ({"structured_outputs": {"json": True, "disable_any_whitespace": True}}, "json", '"whitespace_flexible":false'),
        ({"structured_outputs": {"json_object": True, "whitespace_pattern": " "}}, "json_object", '" "'),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "choice", '"yes" | "no"'),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "grammar", 'start: "a"'),
        ({"structured_outputs": {"structural_tag": {"type": "structural_tag"} | tag}}, "structural_tag", '"<f"'),
        (
            {
                "structured_outputs": {
                    "structural_tag": '{"type": "structural_tag", "triggers": ["<"], '
                    '"structures": [{"begin": "<f>", "schema": {}, "end": ""}]}'
                }
            },
            "structural_tag",
            'TAG_TEXT "<"',
        ),
    ]
    counts: dict[str, int] = {}
    async with serving() as server:
        for fields, kind, part in wanted:
            status, answer = await ask(server, path, **fields)
            assert status == 200, answer
            grammar = server.scheduler.last.params.sampling.grammar
            assert part in grammar if part else grammar == ""
            if kind is not None:
                counts[kind] = counts.get(kind, 0) + 1
        shown = server.shown()
        for kind, count in counts.items():
            assert f'pagewise_structured_requests_total{{kind="{kind}",model_name="{MODEL}"}} {count}.0' in shown
        assert f'pagewise_grammar_check_seconds_count{{model_name="{MODEL}"}} {sum(counts.values())}.0' in shown


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"structured_outputs": {}}, "structured_outputs", "exactly one of"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "it has regex, choice"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs", "it has none"),
    ({"structured_outputs": {"xml": "a"}}, "structured_outputs.xml", "Unrecognized"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "length >= 1"),
    ({"structured_outputs": {"regex": "(?=a)"}}, "structured_outputs.regex", "look-around"),
    ({"structured_outputs": {"grammar": "start: a"}}, "structured_outputs.grammar", "unknown name"),
    ({"structured_outputs": {"structural_tag": "{"}}, "structured_outputs.structural_tag", "truncated"),
    ({"structured_outputs": {"json": {"not": {"const": 1}}}}, "structured_outputs.json", "not supported: not"),
    (
        {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
        "structured_outputs.whitespace_pattern",
        "only allowed with json",
    ),
    (
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "structured_outputs",
        "cannot be used together",
    ),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"patternProperties": {"^a": {"type": "null"}}}},
            }
        },
        "response_format.json_schema.schema",
        "the keyword patternProperties is not supported",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        "response_format.json_schema",
        "schema",
    ),
    ({"response_format": {"type": "structural_tag", "format": {}}}, "response_format.format", "Unrecognized"),
    ({"guided_json": {}}, "guided_json", "not supported"),
]


@pytest.mark.parametrize(("fields", "param", "why"), WRONG, ids=lambda value: repr(value)[:50])
async def test_what_is_wrong_with_a_grammar_is_said(fields: dict[str, Any], param: str, why: str) -> None:
    async with serving() as server:
        status, answer = await ask(server, **fields)
        assert status == 400
        assert answer["error"]["param"].startswith(param)
        assert why in answer["error"]["message"]
        assert server.scheduler.submits == []


async def test_the_end_of_the_sequence_is_where_the_grammar_ends() -> None:
    """The scheduler has to know the tokens that end an output even with ignore_eos, which then forbids to end early."""
    regex = {"structured_outputs": {"regex": "a+"}}
    async with serving() as server:
        for ignored in (False, True):
            await ask(server, **regex, ignore_eos=ignored, stop_token_ids=[7])
            sampling = server.scheduler.last.params.sampling
            assert sampling.stop_token_ids == (EOS, 7)
            assert sampling.constraints == (token_constraints(bad_words=[[EOS]]) if ignored else None)
        await ask(server, ignore_eos=True, stop_token_ids=[7])
        assert server.scheduler.last.params.sampling.stop_token_ids == (7,)
        assert server.scheduler.last.params.sampling.constraints is None
        await ask(server, **regex, use_beam_search=True, n=2)
        assert server.scheduler.last.params.beam is not None
        assert server.scheduler.last.params.sampling.grammar


async def test_a_large_schema_is_taken_and_a_larger_one_is_not() -> None:
    async with serving() as server:
        for count, expected in ((3000, 200), (9000, 400)):
            names = [f"property_{number}" for number in range(count)]
            schema = {"type": "object", "properties": {name: {"type": "string"} for name in names}, "required": names}
            status, answer = await ask(server, structured_outputs={"json": schema})
            assert status == expected, answer
        assert "the limit is 262144" in answer["error"]["message"]
        assert len(server.scheduler.last.params.sampling.grammar) > 100_000


async def test_a_fleet_that_follows_no_grammars_gets_none() -> None:
    async with serving(FakeScheduler(no_grammars="llguidance is not installed")) as server:
        status, answer = await ask(server, structured_outputs={"regex": "a"})
        assert (status, answer["error"]["code"]) == (400, "unsupported_parameter")
        assert answer["error"]["param"] == "structured_outputs.regex"
        assert "llguidance is not installed" in answer["error"]["message"]
        assert (await ask(server))[0] == 200


async def test_a_grammar_that_makes_no_sense_with_the_model_is_the_clients_error() -> None:
    async with serving(FakeScheduler(fail_after=0, fail_kind="invalid")) as server:
        status, answer = await ask(server, structured_outputs={"grammar": "start: <|nothing|>"})
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
