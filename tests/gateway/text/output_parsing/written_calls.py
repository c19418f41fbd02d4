"""Writes calls as models do: a name and parameters, or several calls of them."""

DSML = "\uff5cDSML\uff5c"
_TEXTS = ("city", "z")
"""The parameters whose tags say that they are strings."""


def qwen(name: str, **arguments: str) -> str:
    pairs = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{pairs}</function>\n</tool_call>"


def minimax(*calls: tuple[str, dict[str, str]]) -> str:
    written = "".join(
        f'<invoke name="{name}">\n'
        + "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in arguments.items())
        + "</invoke>\n"
        for name, arguments in calls
    )
    return f"<minimax:tool_call>\n{written}</minimax:tool_call>"


def dsml(*calls: tuple[str, dict[str, str]]) -> str:
    written = "".join(
        f'<{DSML}invoke name="{name}">\n'
        + "".join(
            f'<{DSML}parameter name="{key}" string="{"true" if key in _TEXTS else "false"}">{value}</{DSML}parameter>\n'
            for key, value in arguments.items()
        )
        + f"</{DSML}invoke>\n"
        for name, arguments in calls
    )
    return f"<{DSML}function_calls>\n{written}</{DSML}function_calls>"


def glm(name: str, **arguments: str) -> str:
    pairs = "".join(f"<arg_key>{k}</arg_key><arg_value>{v}</arg_value>" for k, v in arguments.items())
    return f"<tool_call>{name}{pairs}</tool_call>"


def kimi(*calls: tuple[str, str]) -> str:
    written = "".join(
        f"<|tool_call_begin|>{call_id}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
        for call_id, arguments in calls
    )
    return f"<|tool_calls_section_begin|>{written}<|tool_calls_section_end|>"


def gemma(name: str, arguments: str) -> str:
    return f"<|tool_call>call:{name}{{{arguments}}}<tool_call|>"
