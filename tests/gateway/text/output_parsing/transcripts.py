"""Texts of models, by the parsers that read them, and the messages that they mean."""

from tests.gateway.text.output_parsing.newer_transcripts import NEWER
from tests.gateway.text.output_parsing.tables import QUOTED, Transcript

NESTED = '{"city": "Köln \\"}</x>[\\\\", "days": 3, "tags": ["a", {"b": [1, 2]}], "emoji": "🙂\\u00e9"}'
_BEGINS, _ENDS = "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"
_BEGIN, _SEP, _END = (
    "<\uff5ctool\u2581call\u2581begin\uff5c>",
    "<\uff5ctool\u2581sep\uff5c>",
    "<\uff5ctool\u2581call\u2581end\uff5c>",
)


def _hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def _deepseek(name: str, arguments: str) -> str:
    return f"{_BEGIN}function{_SEP}{name}\n```json\n{arguments}\n```{_END}"


def _glm(name: str, **arguments: str) -> str:
    pairs = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in arguments.items())
    return f"<tool_call>{name}\n{pairs}</tool_call>"


def _harmony(name: str, arguments: str) -> str:
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>"


HERMES = [
    Transcript("plain", "hermes", None, "  Hello < you >\n", "  Hello < you >\n"),
    Transcript("a call", "hermes", None, _hermes("get_weather", NESTED), calls=(("get_weather", NESTED),)),
    Transcript(
        "parallel calls, text before and after",
        "hermes",
        None,
        f"Let me see.\n\n{_hermes('get_weather', NESTED)}\n{_hermes('get_time', '{}')}\nDone <b>.\n",
        "Let me see.\nDone <b>.",
        calls=(("get_weather", NESTED), ("get_time", "{}")),
    ),
    Transcript(
        "truncated arguments", "hermes", None, _hermes("save", '{"a": {"b')[:-14], calls=(("save", '{"a": {"b'),)
    ),
    Transcript(
        "truncated name",
        "hermes",
        None,
        'Yes.\n<tool_call>\n{"name": "get_',
        'Yes.\n<tool_call>\n{"name": "get_',
    ),
    Transcript("truncated delimiter", "hermes", None, "Yes.\n<tool_", "Yes.\n<tool_"),
    Transcript("no end of the call", "hermes", None, _hermes("save", "{}")[:-12], calls=(("save", "{}"),)),
    Transcript(
        "arguments before the name",
        "hermes",
        None,
        '<tool_call>{"arguments": {"a": 1}, "name": "save"}</tool_call>',
        calls=(("save", '{"a": 1}'),),
    ),
    Transcript(
        "arguments as text, and none",
        "hermes",
        None,
        '<tool_call>{"name": "save", "arguments": "{\\"a\\": 1}"}</tool_call><tool_call>{"name": "save"}</tool_call>',
        calls=(("save", '{"a": 1}'), ("save", "{}")),
    ),
    Transcript(
        "no call",
        "hermes",
        None,
        "<tool_call>\nnonsense\n</tool_call>\nsorry",
        "<tool_call>\nnonsense\n</tool_call>\nsorry",
    ),
    Transcript("a delimiter too many", "hermes", None, "a</tool_call>b", "a</tool_call>b"),
    Transcript(
        "markers in prose",
        "hermes",
        "qwen3",
        f"Write `<tool_call>` or <tool_call> {{}}, then </tool_call>.\n{_hermes('save', '{}')} <think>a</think>b",
        "Write `<tool_call>` or <tool_call> {}, then </tool_call>.\n<think>a</think>b",
        calls=(("save", "{}"),),
    ),
    Transcript(
        "text between a call and its end",
        "hermes",
        None,
        '<tool_call>{"name": "save", "arguments": {}} and so on</tool_call>',
        "and so on</tool_call>",
        calls=(("save", "{}"),),
    ),
    Transcript(
        "a brace too many",
        "hermes",
        None,
        '<tool_call>{"name": "save", "arguments": {}}}\n</tool_call>Hi',
        "Hi",
        calls=(("save", "{}"),),
    ),
    Transcript(
        "an object behind a call that is none",
        "hermes",
        None,
        '<tool_call>{"name": "save", "arguments": {}}, {"a": 1}</tool_call>',
        ', {"a": 1}</tool_call>',
        calls=(("save", "{}"),),
    ),
    Transcript(
        "delimiters inside of strings",
        "hermes",
        "qwen3",
        f"<think>hm</think>{_hermes('save', QUOTED)}\n{_hermes('get_time', '{}')} Done.",
        "Done.",
        "hm",
        (("save", QUOTED), ("get_time", "{}")),
    ),
    Transcript(
        "a delimiter in a key before the name",
        "hermes",
        None,
        '<tool_call>{"a</tool_call>": 1, "name": "save"}</tool_call>',
        calls=(("save", "{}"),),
    ),
    Transcript(
        "empty arguments",
        "hermes",
        None,
        '<tool_call>{"name": "save", "arguments": ""}</tool_call>'
        '<tool_call>{"arguments": "", "name": "save"}</tool_call>',
        calls=(("save", "{}"), ("save", "{}")),
    ),
    Transcript(
        "objects that are no calls",
        "hermes",
        None,
        '<tool_call>[{"a": 1}, {"b": 2}]</tool_call>',
        '<tool_call>[{"a": 1}, {"b": 2}]</tool_call>',
    ),
]
QWEN = [
    Transcript("reasoning", None, "qwen3", "<think>\na <b>\n</think>\n\nHello.\n", "Hello.", "a <b>"),
    Transcript("begun by the prompt", None, "qwen3", "a\n</think>\n\nHi", "Hi", "a", prompt="...<think>\n"),
    Transcript("ended by the prompt", None, "qwen3", "Hi", "Hi", prompt="...<think>\n\n</think>\n\n"),
    Transcript("truncated reasoning", None, "qwen3", "<think>\na b \n", "", "a b"),
    Transcript(
        "reasoning twice, and a call in it",
        "hermes",
        "qwen3",
        f"<think>a <tool_call> b</think>\n{_hermes('save', '{}')}<think>c</think>Hi",
        "<think>c</think>Hi",
        "a <tool_call> b",
        (("save", "{}"),),
    ),
    Transcript("an end in an answer", None, "qwen3", "a</think>b", "a</think>b"),
    Transcript("reasoning behind text", None, "qwen3", "Sure. <think>a</think>b", "Sure. <think>a</think>b"),
    Transcript("an opening in reasoning", None, "qwen3", "<think>a<think>b</think>c</think>", "c</think>", "a<think>b"),
    Transcript(
        "an answer about reasoning",
        None,
        "qwen3",
        '{"tag": "<think>", "end": "a</think>b"}',
        '{"tag": "<think>", "end": "a</think>b"}',
        prompt="<think>\n\n</think>\n\n",
    ),
]
DEEPSEEK = [
    Transcript("implied reasoning", None, "deepseek_r1", "a</think>\n\nHi", "Hi", "a"),
    Transcript("reasoning that is opened", None, "deepseek_r1", "<think>\na</think>Hi", "Hi", "a"),
    Transcript("an end behind the end", None, "deepseek_r1", "a</think>b</think>c", "b</think>c", "a"),
    Transcript(
        "markers in prose",
        "deepseek_v31",
        None,
        f"{_BEGINS} begins, {_BEGIN} too, {_SEP}{_END}{_ENDS}",
        f"{_BEGINS} begins, {_BEGIN} too, {_SEP}{_END}{_ENDS}",
    ),
    Transcript(
        "text behind the group",
        "deepseek_v31",
        None,
        f"{_BEGINS}\n{_BEGIN}save{_SEP}{{}}{_END} {_ENDS}{_ENDS}",
        _ENDS,
        calls=(("save", "{}"),),
    ),
    Transcript(
        "arguments that are none",
        "deepseek_v31",
        None,
        f"{_BEGINS}{_BEGIN}save{_SEP}nothing{_END}{_ENDS}",
        f"{_BEGINS}{_BEGIN}save{_SEP}nothing{_END}{_ENDS}",
    ),
    Transcript("all reasoning", None, "deepseek_r1", "<thi a", "", "<thi a"),
    Transcript(
        "parallel calls",
        "deepseek_v3",
        "deepseek_r1",
        f"hm</think>\n\nI see.{_BEGINS}{_deepseek('get_weather', NESTED)}\n{_deepseek('get_time', '{}')}{_ENDS}",
        "I see.",
        "hm",
        (("get_weather", NESTED), ("get_time", "{}")),
    ),
    Transcript(
        "version 3.1",
        "deepseek_v31",
        "deepseek_v3",
        f"{_BEGINS}{_BEGIN}save{_SEP}{NESTED}{_END}{_ENDS}",
        calls=(("save", NESTED),),
        prompt="<\uff5cAssistant\uff5c></think>",
    ),
    Transcript(
        "delimiters inside of strings",
        "deepseek_v3",
        None,
        f"{_BEGINS}{_deepseek('save', QUOTED.replace('</tool_call>', _END))}\n{_deepseek('get_time', '{}')}{_ENDS}",
        calls=(("save", QUOTED.replace("</tool_call>", _END)), ("get_time", "{}")),
    ),
    Transcript(
        "truncated",
        "deepseek_v3",
        None,
        f'{_BEGINS}{_BEGIN}function{_SEP}save\n```json\n{{"a": "b',
        calls=(("save", '{"a": "b'),),
    ),
]
LLAMA = [
    Transcript(
        "a call",
        "llama3_json",
        None,
        f'{{"name": "get_weather", "parameters": {NESTED}}}',
        calls=(("get_weather", NESTED),),
    ),
    Transcript(
        "parallel calls",
        "llama3_json",
        None,
        '<|python_tag|>{"name": "save", "parameters": {"a": 1}}; '
        '{"type": "function", "name": "get_time", "parameters": {}}',
        calls=(("save", '{"a": 1}'), ("get_time", "{}")),
    ),
    Transcript("text before", "llama3_json", None, 'I call {"name": "save"}', 'I call {"name": "save"}'),
    Transcript(
        "text after",
        "llama3_json",
        None,
        '{"name": "save", "parameters": {}} and so on',
        "and so on",
        calls=(("save", "{}"),),
    ),
    Transcript("an answer in JSON", "llama3_json", None, '{"answer": [1, {"b": 2}]}', '{"answer": [1, {"b": 2}]}'),
    Transcript(
        "an answer in JSON, to the last space",
        "llama3_json",
        None,
        ' \n{"answer": 1} ;\n{"b": 2}, [] \n',
        ' \n{"answer": 1} ;\n{"b": 2}, [] \n',
    ),
    Transcript(
        "a call behind what is none",
        "llama3_json",
        None,
        '{"type": "a"}; {"name": "save", "parameters": {}}\n',
        '{"type": "a"}; {"name": "save", "parameters": {}}\n',
    ),
    Transcript("a marker in prose", "llama3_json", None, "Use <|python_tag|>print(1)", "Use <|python_tag|>print(1)"),
    Transcript("a tool's name", "llama3_json", None, '{"name": "save", "age": 3}', '{"name": "save", "age": 3}'),
    Transcript("a call without arguments", "llama3_json", None, '{"name": "save"}', calls=(("save", "{}"),)),
    Transcript("no tool", "llama3_json", None, '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}'),
    Transcript(
        "truncated",
        "llama3_json",
        None,
        '{"name": "save", "parameters": {"a": [1, "',
        calls=(("save", '{"a": [1, "'),),
    ),
]
MISTRAL = [
    Transcript(
        "a list",
        "mistral",
        None,
        f'Yes.[TOOL_CALLS][{{"name": "get_weather", "arguments": {NESTED}}}, '
        '{"name": "get_time", "arguments": {}}]',
        "Yes.",
        calls=(("get_weather", NESTED), ("get_time", "{}")),
    ),
    Transcript(
        "names and arguments",
        "mistral",
        "mistral",
        f"[THINK]a[/THINK][TOOL_CALLS]get_weather[ARGS]{NESTED}[TOOL_CALLS]get_time[CALL_ID]abc[ARGS]{{}}",
        "",
        "a",
        (("get_weather", NESTED), ("get_time", "{}")),
    ),
    Transcript(
        "delimiters inside of strings",
        "mistral",
        None,
        '[TOOL_CALLS]save[ARGS]{"a": "[TOOL_CALLS]b[ARGS]"}[TOOL_CALLS]get_time[ARGS]{}',
        calls=(("save", '{"a": "[TOOL_CALLS]b[ARGS]"}'), ("get_time", "{}")),
    ),
    Transcript(
        "markers in prose",
        "mistral",
        "mistral",
        "The [TOOL_CALLS] marker begins calls, [TOOL_CALLS] {} [ARGS] do not, [THINK]a[/THINK]",
        "The [TOOL_CALLS] marker begins calls, [TOOL_CALLS] {} [ARGS] do not, [THINK]a[/THINK]",
    ),
    Transcript(
        "text behind calls",
        "mistral",
        None,
        '[TOOL_CALLS][{"name": "save", "arguments": {}}] [1][TOOL_CALLS]save{"a": 1} and so on',
        "[1]\nand so on",
        calls=(("save", "{}"), ("save", '{"a": 1}')),
    ),
    Transcript("brackets", "mistral", None, "[1] [TOOL [TOOL_CALL]", "[1] [TOOL [TOOL_CALL]"),
    Transcript("truncated", "mistral", None, '[TOOL_CALLS]save[ARGS]{"a', calls=(("save", '{"a'),)),
]
GLM = [
    Transcript(
        "parallel calls",
        "glm45",
        "glm45",
        "\n<think>a</think>\nSure.\n"
        + _glm("get_weather", city='K"ö\nln</arg', days="3", tags='["a"]', note="null")
        + "\n"
        + _glm("get_time")
        + "\n",
        "Sure.",
        "a",
        (
            ("get_weather", '{"city": "K\\"ö\\nln</arg", "days": 3, "tags": ["a"], "note": null}'),
            ("get_time", "{}"),
        ),
    ),
    Transcript(
        "what is not declared",
        "glm45",
        None,
        _glm("save", a="1", b="x y", c='{"d": "é"}'),
        calls=(("save", '{"a": 1, "b": "x y", "c": {"d": "é"}}'),),
    ),
    Transcript(
        "delimiters inside of values",
        "glm45",
        "glm45",
        _glm("save", a="</tool_call> <tool_call><think>", b='"</tool_call>"') + _glm("get_time"),
        calls=(("save", '{"a": "</tool_call> <tool_call><think>", "b": "</tool_call>"}'), ("get_time", "{}")),
    ),
    Transcript(
        "numbers that Python or JSON does not have",
        "glm45",
        None,
        _glm("save", a="[1e999]", b="NaN", c="-1.5"),
        calls=(("save", '{"a": [1e999], "b": "NaN", "c": -1.5}'),),
    ),
    Transcript(
        "truncated", "glm45", None, _glm("get_weather", city="Köln")[:-25], calls=(("get_weather", '{"city": "Köln'),)
    ),
]
GLM += [
    Transcript(
        "markers in prose",
        "glm45",
        "glm45",
        "<tool_call> and <tool_call>x</tool_call> and <tool_call>a b<arg_key>",
        "<tool_call> and <tool_call>x</tool_call> and <tool_call>a b<arg_key>",
    ),
    Transcript(
        "text in a call",
        "glm45",
        None,
        "<tool_call>save\n<arg_key>a</arg_key><arg_value>1</arg_value> so <arg_key>",
        "so <arg_key>",
        calls=(("save", '{"a": 1}'),),
    ),
]
PYTHONIC = [
    Transcript(
        "parallel calls",
        "pythonic",
        None,
        "[get_weather(city='K\"ö\\'ln)', days=-3, tags=[\"a\", ['b']]), save(a={'b': None}, c=True, d=(1.5, false))]",
        calls=(
            ("get_weather", '{"city": "K\\"ö\'ln)", "days": -3, "tags": ["a", ["b"]]}'),
            ("save", '{"a": {"b": null}, "c": true, "d": [1.5, false]}'),
        ),
    ),
    Transcript("fenced", "pythonic", None, "```tool_code\nget_time()\n```\nHi", "Hi", calls=(("get_time", "{}"),)),
    Transcript(
        "brackets behind calls", "pythonic", None, "[get_time()]] (a) [b]", "] (a) [b]", calls=(("get_time", "{}"),)
    ),
    Transcript("no call", "pythonic", None, "[link](http://a)", "[link](http://a)"),
    Transcript("no call, to the last space", "pythonic", None, "\n [1, 2] \n", "\n [1, 2] \n"),
    Transcript("no tool", "pythonic", None, "[print(1)]", "[print(1)]"),
    Transcript("no names", "pythonic", None, "[save(1, '\\d')]", calls=(("save", "1, '\\d'"),)),
    Transcript("truncated", "pythonic", None, "[get_time(), save(a='b", calls=(("get_time", "{}"), ("save", ""))),
]
HARMONY = [
    Transcript(
        "all channels",
        "openai",
        "openai_gptoss",
        "<|channel|>analysis<|message|>I need <b>.<|end|><|start|>assistant<|channel|>commentary<|message|>I look."
        f"<|end|><|start|>assistant{_harmony('get_weather', NESTED)}<|start|>assistant{_harmony('get_time', '{}')}",
        "I look.",
        "I need <b>.",
        (("get_weather", NESTED), ("get_time", "{}")),
    ),
    Transcript(
        "recipient before the channel",
        "openai",
        None,
        ' to=functions.save<|channel|>commentary<|message|>{"a": 1}',
        calls=(("save", '{"a": 1}'),),
    ),
    Transcript(
        "calls without a message",
        "openai",
        "openai_gptoss",
        "<|channel|>commentary to=functions.get_time<|call|><|start|>assistant<|channel|>commentary<|call|> or "
        "<|end|><|start|>assistant<|channel|>commentary to=functions.save <|constrain|>json<|call|>",
        "<|start|>assistant<|channel|>commentary<|call|> or",
        calls=(("get_time", "{}"), ("save", "{}")),
    ),
    Transcript("an answer", "openai", None, "<|channel|>final<|message|>Hi <b> \n\nyou<|return|>", "Hi <b> \n\nyou"),
    Transcript("no channel", "openai", None, "Hi", "Hi"),
    Transcript("an end alone", "openai", None, "<|end|>"),
    Transcript(
        "delimiters in prose",
        "openai",
        "openai_gptoss",
        "<|channel|>final<|message|><|start|>assistant<|channel|>final<|message|> and <|end|> or "
        "<|end|><|call|>, <|start|>",
        "<|start|>assistant<|channel|>final<|message|> and <|end|> or <|end|><|call|>, <|start|>",
    ),
    Transcript(
        "delimiters and no header", "openai", None, "<|channel|> of <|message|>s", "<|channel|> of <|message|>s"
    ),
    Transcript(
        "text behind arguments",
        "openai",
        None,
        _harmony("save", "{} and so on"),
        "and so on",
        calls=(("save", "{}"),),
    ),
    Transcript("truncated", "openai", None, _harmony("save", '{"a": "b')[:-8], calls=(("save", '{"a": "b'),)),
]
_HALF = "\\ud83d"
SURROGATES = [
    Transcript(
        "half a pair",
        "hermes",
        None,
        f'<tool_call>{{"name": "{_HALF}"}}</tool_call>',
        f'<tool_call>{{"name": "{_HALF}"}}</tool_call>',
    ),
    Transcript("half a pair", "pythonic", None, f"[save(a='{_HALF}')]", calls=(("save", f'{{"a": "{_HALF}"}}'),)),
    Transcript(
        "half a pair", "glm45", None, _glm("save", a=f'["{_HALF}"]'), calls=(("save", f'{{"a": ["{_HALF}"]}}'),)
    ),
]
_TEXT = "x </think> [/THINK] <|python_tag|> <|end|> <|start|> y"


def _delimiters(tools: str, reasoning: str | None, written: str, calls: int = 1, thought: str = "") -> Transcript:
    arguments = f'{{"a": "{_TEXT}"}}'
    return Transcript("delimiters in strings", tools, reasoning, written, "", thought, (("save", arguments),) * calls)


DELIMITERS = [
    _delimiters("pythonic", "qwen3", f'[save(a="{_TEXT}"), save(a="{_TEXT}")]', 2),
    _delimiters("pythonic", "qwen3", f'<think>A</think>\n\n[save(a="{_TEXT}")]', thought="A"),
    _delimiters("pythonic", "mistral", f'[THINK]A[/THINK][save(a="{_TEXT}")]', thought="A"),
    _delimiters("llama3_json", "qwen3", f'{{"name": "save", "parameters": {{"a": "{_TEXT}"}}}}'),
    _delimiters(
        "llama3_json", "qwen3", f'A</think>{{"name": "save", "parameters": {{"a": "{_TEXT}"}}}}', 1, "A"
    )._replace(prompt="<think>"),
    _delimiters("openai", None, _harmony("save", f'{{"a": "{_TEXT}"}}')),
]
TRANSCRIPTS = [*HERMES, *QWEN, *DEEPSEEK, *LLAMA, *MISTRAL, *GLM, *PYTHONIC, *HARMONY, *SURROGATES, *DELIMITERS, *NEWER]
