"""Templates that refuse conversations that the APIs allow, like the templates of known models."""

WRITES = (
    "[{{ m.role }}]{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.id }}{% endfor %}"
)
IDS = (
    "{% if m.role == 'tool' and m.tool_call_id|length != 9 %}{{ raise_exception('nine') }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{% if c.id|length != 9 %}{{ raise_exception('nine') }}{% endif %}{% endfor %}"
)
LENIENT = "{% for m in messages %}" + WRITES + "{% endfor %}"
MISTRAL = (  # calls and results do not count; ids have nine characters
    "{% set ns = namespace(turn=0) %}{% for m in (messages[1:] if messages[0].role == 'system' else messages) %}"
    "{% if m.role in ('user', 'assistant') and not m.tool_calls %}"
    "{% if (m.role == 'user') != (ns.turn % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}"
    "{% set ns.turn = ns.turn + 1 %}{% endif %}"
    "{% if m.role == 'system' %}{{ raise_exception('only at the beginning') }}{% endif %}"
    + IDS
    + "{% endfor %}"
    + LENIENT
)
GEMMA = (  # no system message, and no tools
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}"
    "{% endfor %}" + LENIENT
)
LLAMA_2 = (
    "{% for m in (messages[1:] if messages[0].role == 'system' else messages) %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}"
    "{% endfor %}" + LENIENT
)
LLAMA_3 = (  # one call in a message, with its result behind it
    "{% for m in messages %}{% if m.tool_calls and m.tool_calls|length != 1 %}"
    "{{ raise_exception('single tool-calls') }}{% endif %}{% endfor %}" + LENIENT
)
NAMES = (
    "{% for m in messages %}{% if m.role == 'tool' and not m.name %}{{ raise_exception('name') }}{% endif %}"
    "{% endfor %}" + LENIENT.replace("[{{ m.role }}]", "[{{ m.role }}{{ m.name }}]")
)
USER = (
    "{% if not messages|selectattr('role', 'equalto', 'user')|list %}{{ raise_exception('no user') }}{% endif %}"
) + LENIENT
ONLY_IDS = "{% for m in messages %}" + IDS + "{% endfor %}" + LENIENT
TEMPLATES = {"mistral": MISTRAL, "gemma": GEMMA, "llama 2": LLAMA_2, "ids": ONLY_IDS, "lenient": LENIENT}
TEMPLATES |= {"llama 3": LLAMA_3, "names": NAMES, "user": USER}
