"""A model that calls tools as Hermes and Qwen 3 do: its tokenizer, its template, and outputs for the fake scheduler."""

from pagewise_gateway.text.tokenizer import Tokenizer

from tests.gateway.text.tokenizer_builders import byte_level_backend

TEMPLATE = (
    "{% if tools %}<|user|>tools: {% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|end|>{% endif %}"
    "{% for message in messages %}<|user|>{{ message['role'] }}: {{ message['content'] or '' }}"
    "{% for call in message.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    "{% if thinking %}<think>\n{% endif %}"
)
SPECIAL = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<|noise|>")
TOKENIZER = Tokenizer(byte_level_backend(SPECIAL), eos_token_ids=frozenset({0}), chat_template=TEMPLATE)
HERMES = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes", "reasoning_parser": "qwen3"}

ARGUMENTS = '{"city": "K\u00f6ln \\"</x>\\" \U0001f642", "days": 3}'
CALLS = (
    f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
)
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}


def reply(text: str, end: bool = True) -> list[int]:
    """The tokens of an output, and of its end."""
    return TOKENIZER.encode(text, add_special_tokens=False) + [0] * end
