"""Schemas and grammars that keep llguidance busy for hours: they are refused, and other requests continue."""

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from tests.abuse.abuser import post
from tests.abuse.bystander import BYSTANDER, Serve, unharmed
from tests.free_cores import FreeCores

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PATTERNS = [f".*a.{{{number}}}b.*" for number in range(1, 40)]
SCHEMA = {"allOf": [{"type": "string", "pattern": pattern} for pattern in PATTERNS]}
NESTED = {"type": "object", "properties": {"x": SCHEMA}}
TAG = {"structures": [{"begin": "<f>", "schema": NESTED, "end": "</f>"}], "triggers": ["<f"]}
TOO_MANY = "times characters, may be at most 200000"
TOO_LONG = r"compiling it takes more than 0\.5 s|grammar\) too big"
"""Which of the two bounds a grammar meets first depends on the processor."""
DOUBLED = "start: A\n" + "".join(f"A{n or ''}: A{n + 1} A{n + 1}\n" for n in range(40)) + 'A40: "b"'
"""Takes seconds, and joins nothing: only the process in which it is compiled bounds it."""
CHEAP = {"prompt": "a", "max_tokens": 1, "structured_outputs": {"choice": ["yes", "no"]}}


def outputs(**given: Any) -> dict[str, Any]:
    return {"prompt": "a", "structured_outputs": given}


ATTACKS: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, outputs(json=SCHEMA), TOO_MANY),
    (COMPLETIONS, outputs(json=json.dumps(NESTED)), TOO_MANY),
    (COMPLETIONS, outputs(structural_tag={"type": "structural_tag"} | TAG), TOO_MANY),
    (COMPLETIONS, outputs(grammar="start: X\nX: " + " & ".join(f"/{each}/" for each in PATTERNS)), TOO_MANY),
    (COMPLETIONS, outputs(grammar=f"start: %json {json.dumps(NESTED)}"), TOO_MANY),
    (COMPLETIONS, outputs(grammar=DOUBLED), TOO_LONG),
    (
        CHAT,
        {
            "messages": [{"role": "user", "content": "hi"}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": NESTED}},
        },
        TOO_MANY,
    ),
]


def test_expensive_grammars_are_refused_and_delay_no_other_key(serve: Serve, tmp_path: Path) -> None:
    """The bounds of time are for a machine without other work (see ``FreeCores``)."""
    with serve(tmp_path) as server, ThreadPoolExecutor(4) as pool:
        assert post(server, COMPLETIONS, CHEAP, BYSTANDER).status == 200
        assert post(server, COMPLETIONS, CHEAP).status == 200

        def attack(number: int) -> float:
            path, body, reason = ATTACKS[number % len(ATTACKS)]
            if "grammar" in (given := body.get("structured_outputs", {})):  # another one each time
                body = body | {"structured_outputs": {"grammar": f"{given['grammar']}\n// {number}"}}
            began = time.perf_counter()
            answer = post(server, path, body)
            assert answer.status == 400, answer.body
            assert re.search(reason, answer.message), answer.message
            return time.perf_counter() - began

        with unharmed(server, growth_mb=100):
            cores, waited = FreeCores(), []
            attacks = [pool.submit(attack, number) for number in range(2 * len(ATTACKS))]
            while not all(each.done() for each in attacks):
                began = time.perf_counter()
                cheap = CHEAP | {"structured_outputs": {"choice": ["yes", f"no {len(waited)}"]}}
                assert post(server, COMPLETIONS, cheap, BYSTANDER).status == 200
                waited.append(time.perf_counter() - began)
            took, share = [each.result() for each in attacks], cores.share()
        print(f"refused after {median(took):.2f} s, at most {max(took):.2f}; others waited at most {max(waited):.2f} s")
        assert max(waited) * share < 1.0
        assert max(took) * share < 5.0
