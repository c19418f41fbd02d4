"""Texts of models whose formats came after 2025, and the messages that they mean: a table like ``transcripts``."""

from collections.abc import Callable

from tests.gateway.text.output_parsing.tables import QUOTED, Transcript
from tests.gateway.text.output_parsing.written_calls import DSML, dsml, gemma, glm, kimi, minimax, qwen

CALLED = {
    "city": 'K"ö\nln \\ <b> 🙂',
    "days": "-3",
    "tags": '["a", {"b": null}]',
    "note": "null",
    "x": "1.5",
    "y": "true",
    "z": "free text",
}
"""Parameters as tags have them. The last three are not declared."""
ARGUMENTS = (
    '{"city": "K\\"ö\\nln \\\\ <b> 🙂", "days": -3, "tags": ["a", {"b": null}], "note": null, "x": 1.5, "y": true, '
    '"z": "free text"}'
)


_WEATHER, _TIME = ("get_weather", ARGUMENTS), ("get_time", "{}")
_MANY: dict[str, tuple[Callable[[], str], str | None]] = {
    "qwen3_coder": (lambda: f"{qwen('get_weather', **CALLED)}\n{qwen('get_time')}", "qwen3"),
    "qwen3_xml": (lambda: f"{qwen('get_weather', **CALLED)}\n{qwen('get_time')}", "nemotron_v3"),
    "minimax_m2": (lambda: minimax(("get_weather", CALLED), ("get_time", {})), "minimax_m2"),
    "deepseek_v32": (lambda: dsml(("get_weather", CALLED), ("get_time", {})), "deepseek_v3"),
    "glm47": (lambda: glm("get_weather", **CALLED) + glm("get_time"), "glm47"),
}
TAGGED = [
    transcript
    for parser, (calls, reasoning) in _MANY.items()
    for transcript in (
        Transcript(
            "parallel calls, text before and after",
            parser,
            reasoning,
            f"<think>\nhm <b>\n</think>\n\nI see.\n{calls()}\nDone <b>.",
            "I see.\nDone <b>.",
            "hm <b>",
            (_WEATHER, _TIME),
        ),
        Transcript("no calls", parser, reasoning, " < you >\n", "< you >", prompt="</think>"),
        Transcript(
            "begun by the prompt",
            parser,
            reasoning,
            f"hm</think>{calls()}",
            "",
            "hm",
            (_WEATHER, _TIME),
            prompt="<think>\n",
        ),
    )
]
QWEN_CODER = [
    Transcript("without the outer tag", "qwen3_coder", None, "a <function=get_time>\n</function>", "a", calls=(_TIME,)),
    Transcript(
        "two in one outer tag, and on one line",
        "qwen3_coder",
        None,
        "<tool_call><function=save><parameter=a>1</parameter></function><function=get_time></function></tool_call>",
        calls=(("save", '{"a": 1}'), _TIME),
    ),
    Transcript(
        "without the closing of the function",
        "qwen3_coder",
        None,
        "<tool_call>\n<function=save>\n<parameter=a>\n1\n</parameter>\n</tool_call>\nHi",
        "Hi",
        calls=(("save", '{"a": 1}'),),
    ),
    Transcript(
        "empty texts and line breaks",
        "qwen3_coder",
        None,
        "<tool_call>\n<function=get_weather>\n<parameter=city>\n\n</parameter>\n<parameter=note>\n\n a\n\n</parameter>"
        "\n</function>\n</tool_call>",
        calls=(("get_weather", '{"city": "", "note": "\\n a\\n"}'),),
    ),
    Transcript(
        "delimiters inside of values",
        "qwen3_coder",
        "qwen3",
        qwen("get_weather", city="</tool_call> <function=x> </function> <think>", tags='["</parameter>"]')
        + qwen("get_time"),
        calls=(
            ("get_weather", '{"city": "</tool_call> <function=x> </function> <think>", "tags": ["</parameter>"]}'),
            _TIME,
        ),
    ),
    Transcript(
        "what is not JSON",
        "qwen3_coder",
        None,
        qwen("get_weather", days="three", tags="{'a': [True, None, (1, 'b')]}"),
        calls=(("get_weather", '{"days": "three", "tags": {"a": [true, null, [1, "b"]]}}'),),
    ),
    Transcript(
        "truncated text",
        "qwen3_coder",
        None,
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nKö",
        calls=(("get_weather", '{"city": "Kö'),),
    ),
    Transcript(
        "truncated number",
        "qwen3_coder",
        None,
        "<tool_call>\n<function=get_weather>\n<parameter=days>\n1",
        calls=(("get_weather", '{"days": '),),
    ),
    Transcript(
        "truncated name", "qwen3_coder", None, "Yes.\n<tool_call>\n<function=get_", "Yes.\n<tool_call>\n<function=get_"
    ),
    Transcript(
        "markers in prose",
        "qwen3_coder",
        None,
        "A <tool_call> has <function=a b> and <parameter=c>, </function></tool_call>",
        "A <tool_call> has <function=a b> and <parameter=c>, </function></tool_call>",
    ),
    Transcript(
        "text in a call",
        "qwen3_coder",
        None,
        "<tool_call><function=get_weather><parameter=days>1</parameter> and so on</function></tool_call>",
        "and so on</function>",
        calls=(("get_weather", '{"days": 1}'),),
    ),
    Transcript(
        "closing tags that are text",
        "qwen3_coder",
        None,
        qwen("get_weather", city="<x>\n</parameter>\n</x></parameter>", days="1") + qwen("save", a="b</parameter> c"),
        calls=(
            ("get_weather", '{"city": "<x>\\n</parameter>\\n</x></parameter>", "days": 1}'),
            ("save", '{"a": "b</parameter> c"}'),
        ),
    ),
    Transcript(
        "the next call without an end of the last one",
        "qwen3_coder",
        None,
        f"<tool_call>\n<function=save>\n<parameter=a>\nb\n</parameter>\n{qwen('get_time')}",
        calls=(("save", '{"a": "b"}'), _TIME),
    ),
    Transcript(
        "no value, as Python and JSON write it",
        "qwen3_coder",
        None,
        qwen("get_weather", note="None", city="None") + qwen("get_weather", note="null", city="null"),
        calls=(
            ("get_weather", '{"note": null, "city": "None"}'),
            ("get_weather", '{"note": null, "city": "null"}'),
        ),
    ),
]
WITHOUT_END = [
    Transcript(
        "the next parameter ends a text",
        "qwen3_coder",
        None,
        qwen("get_weather", city="a\n<parameter=other>\n<parameter=city>\n<parameter", days="1").replace(
            "\n</parameter>", "", 1
        ),
        calls=(("get_weather", '{"city": "a\\n<parameter=other>\\n<parameter=city>\\n<parameter", "days": 1}'),),
    ),
    Transcript(
        "the next parameter ends JSON",
        "qwen3_coder",
        None,
        qwen("get_weather", days="1", tags='["\\n<parameter=city>"]', x="[2]", city="b").replace("\n</parameter>", ""),
        calls=(("get_weather", '{"days": 1, "tags": ["\\n<parameter=city>"], "x": [2], "city": "b"}'),),
    ),
    Transcript(
        "the end of the call ends a text, before another call",
        "qwen3_coder",
        None,
        f"{qwen('save', a='b')}\n{qwen('get_weather', city='c')}".replace("\n</parameter>", "") + qwen("get_time"),
        calls=(("save", '{"a": "b"}'), ("get_weather", '{"city": "c"}'), _TIME),
    ),
    Transcript(
        "the end of the call ends a number, before other text",
        "qwen3_coder",
        None,
        qwen("get_weather", days="3").replace("\n</parameter>", "") + "Hi",
        "Hi",
        calls=(("get_weather", '{"days": 3}'),),
    ),
    Transcript(
        "the end of the call ends a text, before other text",
        "qwen3_coder",
        None,
        qwen("get_weather", city="b").replace("\n</parameter>", "") + "Done </parameter> <b>.",
        "Done </parameter> <b>.",
        calls=(("get_weather", '{"city": "b"}'),),
    ),
    Transcript(
        "the next parameter and the end of the call",
        "minimax_m2",
        None,
        minimax(("get_weather", {"city": "a </invoke>", "days": "1", "note": "b"})).replace("</parameter>", "") + "Hi",
        "Hi",
        calls=(("get_weather", '{"city": "a </invoke>", "days": 1, "note": "b"}'),),
    ),
    Transcript(
        "the next parameter and the end of the call",
        "deepseek_v32",
        None,
        dsml(("get_weather", {"city": "a", "days": "1"})).replace(f"</{DSML}parameter>", ""),
        calls=(("get_weather", '{"city": "a", "days": 1}'),),
    ),
    Transcript(
        "the next parameter",
        "glm47",
        None,
        glm("get_weather", city="a <arg_key>", days="1").replace("</arg_value>", "", 1),
        calls=(("get_weather", '{"city": "a <arg_key>", "days": 1}'),),
    ),
]
MINIMAX = [
    Transcript(
        "on one line, and names without quotes",
        "minimax_m2",
        None,
        "<minimax:tool_call><invoke name=save><parameter name=a>1</parameter></invoke></minimax:tool_call>",
        calls=(("save", '{"a": 1}'),),
    ),
    Transcript(
        "text is as it is",
        "minimax_m2",
        None,
        minimax(("get_weather", {"city": "\n a </invoke> "})),
        calls=(("get_weather", '{"city": "\\n a </invoke> "}'),),
    ),
    Transcript(
        "text between calls of one group",
        "minimax_m2",
        None,
        minimax(("get_time", {})).replace("</invoke>", '</invoke>and<invoke name="get_time"></invoke> so on'),
        "and\nso on",
        calls=(_TIME, _TIME),
    ),
    Transcript(
        "implied reasoning", "minimax_m2", "minimax_m2", f"hm</think>\n{minimax(('get_time', {}))}", "", "hm", (_TIME,)
    ),
    Transcript(
        "markers in prose",
        "minimax_m2",
        None,
        '<minimax:tool_call> and <invoke name="a b"> and <invoke name="',
        '<minimax:tool_call> and <invoke name="a b"> and <invoke name="',
    ),
    Transcript(
        "truncated",
        "minimax_m2",
        None,
        minimax(("save", {"a": "x"}))[:-42],
        calls=(("save", '{"a": '),),
    ),
]
DEEPSEEK_V32 = [
    Transcript(
        "types that tags and schemas name",
        "deepseek_v32",
        None,
        f'<{DSML}function_calls><{DSML}invoke name="get_weather"><{DSML}parameter name="days" string="true">3'
        f'</{DSML}parameter><{DSML}parameter name="note" string="true">null</{DSML}parameter>'
        f'<{DSML}parameter name="city" string="false">4</{DSML}parameter>'
        f'<{DSML}parameter name="x" string="true">5</{DSML}parameter>'
        f'<{DSML}parameter name="y">6</{DSML}parameter></{DSML}invoke></{DSML}function_calls>',
        calls=(("get_weather", '{"days": 3, "note": "null", "city": "4", "x": "5", "y": 6}'),),
    ),
    Transcript(
        "markers in prose",
        "deepseek_v32",
        None,
        f"<{DSML}function_calls> <{DSML}invoke> </{DSML}function_calls>",
        f"<{DSML}function_calls> <{DSML}invoke> </{DSML}function_calls>",
    ),
    Transcript(
        "truncated",
        "deepseek_v32",
        None,
        dsml(("get_weather", {"city": "Köln"}))[:-53],
        calls=(("get_weather", '{"city": "Köln'),),
    ),
]
GLM_47 = [
    Transcript(
        "names in tools alone",
        "glm47",
        None,
        "a <tool_call>get_time</tool_call>\n<tool_call>b</tool_call>",
        "a\n<tool_call>b</tool_call>",
        calls=(_TIME,),
    ),
    Transcript(
        "line breaks as in 4.5",
        "glm47",
        None,
        "<tool_call>save\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
        calls=(("save", '{"a": 1}'),),
    ),
]
KIMI = [
    Transcript(
        "parallel calls, text before and after",
        "kimi_k2",
        "kimi_k2",
        "<think>hm</think>I see. "
        + kimi(("functions.get_weather:0", QUOTED.replace("</tool_call>", "<|tool_call_end|>")), ("get_time:1", "{}"))
        + "Done.",
        "I see.\nDone.",
        "hm",
        (
            ("get_weather", QUOTED.replace("</tool_call>", "<|tool_call_end|>"), "functions.get_weather:0"),
            ("get_time", "{}", "get_time:1"),
        ),
    ),
    Transcript(
        "the same id twice, and white space",
        "kimi_k2",
        None,
        kimi(("functions.save:0 ", '{\n "a": 1\n} '), (" functions.save:0", "{}")),
        calls=(("save", '{\n "a": 1\n}', "functions.save:0"), ("save", "{}")),
    ),
    Transcript(
        "calls that end the reasoning",
        "kimi_k2",
        "kimi_k2",
        f"hm {kimi(('functions.get_time:0', '{}'))}",
        "",
        "hm",
        (("get_time", "{}", "functions.get_time:0"),),
    ),
    Transcript(
        "arguments that are none",
        "kimi_k2",
        None,
        kimi(("functions.get_time:0", "")),
        calls=(("get_time", "{}", "functions.get_time:0"),),
    ),
    Transcript(
        "ids that are none", "kimi_k2", None, kimi(("functions.save.0", "{}")), kimi(("functions.save.0", "{}"))
    ),
    Transcript(
        "truncated",
        "kimi_k2",
        None,
        kimi(("functions.save:0", '{"a": "b'))[:-43],
        calls=(("save", '{"a": "b', "functions.save:0"),),
    ),
    Transcript(
        "markers in prose",
        "kimi_k2",
        None,
        "<|tool_calls_section_begin|> a <|tool_call_begin|> b <|tool_call_argument_begin|>",
        "<|tool_calls_section_begin|> a <|tool_call_begin|> b <|tool_call_argument_begin|>",
    ),
]
_GEMMA = 'city:<|"|>K"ö\nln \\ {,}:<b><|"|>,days:-3,tags:[<|"|>a<|"|>,{b:null,<|"|>c d<|"|>:[]}],note:None,y:true,z:{}'
_GEMMA_ARGUMENTS = (
    '{"city": "K\\"ö\\nln \\\\ {,}:<b>", "days": -3, "tags": ["a", {"b": null, "c d": []}], "note": null, "y": true, '
    '"z": {}}'
)
GEMMA = [
    Transcript(
        "parallel calls, text before and after",
        "gemma4",
        "gemma4",
        f"<|channel>thought\nhm\n<channel|>I see.{gemma('get_weather', _GEMMA)}{gemma('get_time', '')}Done.",
        "I see.\nDone.",
        "hm",
        (("get_weather", _GEMMA_ARGUMENTS), _TIME),
    ),
    Transcript(
        "calls that end the reasoning",
        "gemma4",
        "gemma4",
        f"<|channel>thought\nhm{gemma('get_time', '')}",
        "",
        "hm",
        (_TIME,),
    ),
    Transcript("ended by the prompt", None, "gemma4", "Hi", "Hi", prompt="<|turn>model\n<|channel>thought\n<channel|>"),
    Transcript(
        "space and commas",
        "gemma4",
        None,
        gemma("save", ' a : 1.50 , b : [ 1 , 2 , ] , c : bare text , "d":1, '),
        calls=(("save", '{"a": 1.50, "b": [1, 2], "c": "bare text", "\\"d\\"": 1}'),),
    ),
    Transcript(
        "what is missing",
        "gemma4",
        None,
        gemma("save", "a:,b,c:"),
        calls=(("save", '{"a": null, "b": null, "c": null}'),),
    ),
    Transcript(
        "delimiters inside of strings",
        "gemma4",
        "gemma4",
        gemma("save", 'a:<|"|><tool_call|> <|tool_call>call:x{ <|channel>thought<|"|>') + gemma("get_time", ""),
        calls=(("save", '{"a": "<tool_call|> <|tool_call>call:x{ <|channel>thought"}'), _TIME),
    ),
    Transcript("truncated string", "gemma4", None, gemma("save", 'a:<|"|>Kö')[:-13], calls=(("save", '{"a": "Kö'),)),
    Transcript("truncated number", "gemma4", None, "<|tool_call>call:save{a:1", calls=(("save", '{"a": '),)),
    Transcript("truncated name", "gemma4", None, "a <|tool_call>call:sa", "a <|tool_call>call:sa"),
    Transcript("markers in prose", "gemma4", None, "<|tool_call> call <tool_call|>", "<|tool_call> call <tool_call|>"),
]
NEMOTRON = [
    Transcript(
        "parallel calls, text before and after",
        "nemotron_json",
        "nemotron_v3",
        f'<think>hm</think>I see.<TOOLCALL>[{{"name": "save", "arguments": {QUOTED}}}, '
        '{"name": "get_time", "arguments": {}}]</TOOLCALL>Done.',
        "I see.\nDone.",
        "hm",
        (("save", QUOTED), _TIME),
    ),
    Transcript("no list", "nemotron_json", None, '<TOOLCALL>{"name": "get_time"}</TOOLCALL>', calls=(_TIME,)),
    Transcript(
        "truncated",
        "nemotron_json",
        None,
        '<TOOLCALL>[{"name": "save", "arguments": {"a": [1',
        calls=(("save", '{"a": [1'),),
    ),
]
NEWER = [*TAGGED, *QWEN_CODER, *WITHOUT_END, *MINIMAX, *DEEPSEEK_V32, *GLM_47, *KIMI, *GEMMA, *NEMOTRON]
