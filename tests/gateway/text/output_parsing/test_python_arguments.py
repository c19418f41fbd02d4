"""Arguments in Python as JSON, beside the results of Python's own parser."""

import ast
import itertools
import json
import warnings
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagewise_gateway.text.output_parsing.pythonic import PythonArguments


def translated(written: str, cuts: tuple[int, ...] = ()) -> str:
    """The arguments in a call that ends behind them, in pieces."""
    arguments, text = PythonArguments(), f"{written})x"
    borders = [0, *sorted(cuts), len(text)]
    for first, behind in itertools.pairwise(borders):
        piece = text[first:behind]
        if (end := arguments.push(piece)) >= 0:
            assert first + end == len(written) + 1
            return arguments.finish()
    raise AssertionError("it has no end")


def parsed(written: str) -> Any:
    """The value that Python reads; raises if JSON cannot express it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        call = ast.parse(f"f({written}\n)", mode="eval").body
    if not isinstance(call, ast.Call) or call.args or any(each.arg is None for each in call.keywords):
        raise ValueError("no names")
    return {str(each.arg): value(each.value) for each in call.keywords}


def value(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in ("true", "false", "null"):
        return {"true": True, "false": False, "null": None}[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [value(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        return {text(key): value(each) for key, each in zip(node.keys, node.values, strict=True)}
    found = ast.literal_eval(node)
    if not isinstance(found, str | int | float | bool | None):
        raise ValueError("not in JSON")
    json.dumps(found, allow_nan=False)
    return found


def text(node: ast.expr | None) -> str:
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
        raise ValueError("no string")
    return node.value


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.from_regex(r"arg_[a-z0-9]{0,4}", fullmatch=True), VALUES, max_size=4), st.data())
def test_values_that_python_writes(arguments: dict[str, Any], data: st.DataObject) -> None:
    written = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    cuts = tuple(data.draw(st.sets(st.integers(0, len(written)), max_size=5)))
    assert json.loads(translated(written, cuts)) == arguments
    as_json = ",".join(f" {name} = {json.dumps(value)} " for name, value in arguments.items())
    assert json.loads(translated(as_json)) == arguments


FRAGMENTS = [
    *("a=", "b=", "a", "=", ",", ", ", ":", "(", ")", "[", "]", "{", "}", "()", "[]", "{}", "(1,)", "(1)"),
    *("1", "-1", "- 2", "1.5", "007", "1_0", "2j", "True", "null", "None", "nan", "...", "x", " ", "\n"),
    *(
        "'a'",
        '"b"',
        "'c' \"d\"",
        "r'\\d'",
        "b'e'",
        "f'g'",
        "'\\n\\''",
        '"\\ud83d"',
        "'\\d'",
        "'k': 2",
        "'k': ",
        "**x",
        "lambda: 1",
        "# it's )\n",
        '""',
        "''",
        "'a\n",
    ),
]


@settings(max_examples=600)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=10))
def test_what_python_does_not_read_stays_as_it_was_written(fragments: list[str]) -> None:
    written = "a=" + "".join(fragments)
    arguments = PythonArguments()
    end = arguments.push(f"{written})")
    given = written[: end - 1] if 0 < end <= len(written) else written
    if end < 0:
        return
    try:
        expected = parsed(given)
    except (ValueError, SyntaxError):
        assert arguments.finish() == given
    else:
        assert json.loads(arguments.finish()) == expected


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("", {}),
        ("a=1,", {"a": 1}),
        ("a=(1, 2.5), b=(), c=(3,), d=(4)", {"a": [1, 2.5], "b": [], "c": [3], "d": 4}),
        ("a='b' \"c\"\n 'd'", {"a": "bcd"}),
        ("a={'b': {\"c\": [None, true, False]},}", {"a": {"b": {"c": [None, True, False]}}}),
        ("a=r'\\d', b='\\x41\\'\\\\'", {"a": "\\d", "b": "A'\\"}),
        ("a='\\ud83d\\ude42'", {"a": "\U0001f642"}),
        (
            'a="""it\'s ""\\""" (\nb""", b=\'\', c="", d=\'\'\'\'\'\', e=\'\' "f"',
            {"a": 'it\'s """"" (\nb', "b": "", "c": "", "d": "", "e": "f"},
        ),
        ("a=1, # it's )\nb=2 # c\n", {"a": 1, "b": 2}),
        ("a=1, b=2, a=3", {"a": 3, "b": 2}),
        ("a=-(1), b={('k'): 1}, c=('d' 'e')", {"a": -1, "b": {"k": 1}, "c": "de"}),
        ("from=1, class='a', in=[]", {"from": 1, "class": "a", "in": []}),
        ("a=0x10, b=1_000, c=-0.5", {"a": 16, "b": 1000, "c": -0.5}),
    ],
)
def test_examples(written: str, arguments: dict[str, Any]) -> None:
    assert json.loads(translated(written)) == arguments
    assert json.loads(translated(written, tuple(range(1, len(written))))) == arguments


@pytest.mark.parametrize("number", ["1e999", "-1E+999", "9" * 5000, f"[{'9' * 5000}.5e-3]"])
def test_numbers_of_json_have_any_size(number: str) -> None:
    """A grammar may let the model write them, and Python would not read them."""
    assert translated(f"a={number}") == f'{{"a": {number}}}'


@pytest.mark.parametrize(
    "written",
    [
        *("1", "a=b", "a=f(1)", "a=[1 2]", "a={1}", "a={1: 2}", "a=b'c'", "a==1"),
        *(
            "*a",
            "**a",
            "a=[,]",
            "a={'b':}",
            "a='b\nc'",
            "a=" + "0x" + "9" * 5000,
            "a=" + "[" * 300 + "]" * 300,
            "a=(1]",
        ),
    ],
)
def test_what_is_no_object_stays_as_it_was_written(written: str) -> None:
    assert translated(written) == written
    assert translated(written, tuple(range(1, len(written)))) == written
