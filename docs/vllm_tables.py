"""The tables of ``docs/vllm-flags.md``: what the options of ``vllm serve`` are here."""

from pagewise_shared.config import ServeConfig, options_of
from pagewise_shared.config.vllm import FLAGS, SAME, Flag


def same_names() -> list[tuple[str, str]]:
    """The options of the same name, and what they do here. Those that differ in something are in the next table."""
    options = {option.flag: option for option in options_of(ServeConfig).values()}
    others = {name for flag in FLAGS for name in flag.names}
    names = [name for name in SAME if name not in others]
    return [(_code(name), str(options[name].meta["text"]) if name in options else "MODEL") for name in names]


def accepted() -> list[tuple[str, str, str]]:
    """Options that are taken: what they set, and what differs."""
    options = options_of(ServeConfig)
    lines = []
    for flag in FLAGS:
        if not flag.accepted:
            continue
        if flag.option:
            option = options[flag.option]
            here = _code(option.variable if option.secret else option.flag)
        elif True in flag.harmless:
            here = "always so"
        else:
            here = "only " + ", ".join(_code(value) for value in sorted(map(str, flag.harmless)))
        lines.append((_names(flag), here, flag.text))
    return lines


def refused() -> list[tuple[str, str]]:
    """Options that are refused, and the sentence that the error says."""
    return [(_names(flag), flag.text) for flag in FLAGS if not flag.accepted]


def _names(flag: Flag) -> str:
    return ", ".join(map(_code, flag.names))


def _code(text: str) -> str:
    return f"`{text}`"
