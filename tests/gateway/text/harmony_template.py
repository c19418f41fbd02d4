"""A chat template that reads conversations as gpt-oss's does, and writes them in OpenAI's format Harmony.

It takes reasoning as ``thinking``, writes the first call of a message alone, writes arguments and results as JSON, and
leaves out the reasoning before an answer. It refuses reasoning beside text in a message with calls, and tools without a
description. It names the function that was called last in a result. Of parameters it knows texts, numbers and booleans.
"""

HARMONY = """
{%- macro kind(spec) -%}
{{ '"' + spec.enum | join('" | "') + '"' if spec.enum else 'number' if spec.type == 'integer' else spec.type }}
{%- endmacro -%}
{%- macro functions() -%}
{{ '# Tools\\n\\n## functions\\n\\nnamespace functions {\\n\\n' }}
{%- for tool in tools | map(attribute='function') -%}
  {{ '// ' + tool.description + '\\n' }}{{ 'type ' + tool.name + ' = ' }}
  {%- if tool.parameters and tool.parameters.properties -%}
    {{ '(_: {\\n' }}
    {%- for name, spec in tool.parameters.properties.items() -%}
      {{ '// ' + spec.description + '\\n' if spec.description }}
      {{- name + ('' if name in (tool.parameters.required or []) else '?') + ': ' + kind(spec) + ',' }}
      {{- ' // default: ' + spec.default | tojson if spec.default is defined }}{{ '\\n' }}
    {%- endfor -%}
    {{ '}) => any;\\n\\n' }}
  {%- else -%}
    {{ '() => any;\\n\\n' }}
  {%- endif -%}
{%- endfor -%}
{{ '} // namespace functions' }}
{%- endmacro -%}
{%- macro written(header, text, end='<|end|>') -%}
{{ '<|start|>' + header + '<|message|>' + text + end }}
{%- endmacro -%}
{%- set system -%}
{{ 'You are ChatGPT, a large language model trained by OpenAI.\\nKnowledge cutoff: 2024-06\\nCurrent date: ' }}
{{- strftime_now('%Y-%m-%d') + '\\n\\nReasoning: ' + (reasoning_effort or 'medium') + '\\n\\n' }}
{{- '# Valid channels: analysis, commentary, final. Channel must be included for every message.' }}
{{- "\\nCalls to these tools must go to the commentary channel: 'functions'." if tools }}
{%- endset -%}
{{ written('system', system) }}
{%- set of_developer = messages[0].role in ('developer', 'system') -%}
{%- set turns = messages[1:] if of_developer else messages -%}
{%- if of_developer or tools -%}
  {%- set instructions = '# Instructions\\n\\n' + messages[0].content if of_developer else '' -%}
  {%- set between = '\\n\\n' if instructions and tools else '' -%}
  {{ written('developer', instructions + between + (functions() if tools else '')) }}
{%- endif -%}
{%- set called = namespace(name=none) -%}
{%- for message in turns -%}
  {%- if message.role == 'user' -%}
    {{ written('user', message.content) }}
  {%- elif message.role == 'tool' -%}
    {{ written('functions.' + called.name + ' to=assistant<|channel|>commentary', message.content | tojson) }}
  {%- elif message.tool_calls -%}
    {%- set after = turns[loop.index:] | selectattr('role', 'equalto', 'assistant') | list -%}
    {%- if message.content and message.thinking -%}
      {{ raise_exception('both content and thinking in a message with tool calls') }}
    {%- elif message.content + (message.thinking or '') and not after | rejectattr('tool_calls', 'defined') | list -%}
      {{ written('assistant<|channel|>analysis', message.content + (message.thinking or '')) }}
    {%- endif -%}
    {%- set call = message.tool_calls[0].function -%}
    {%- set called.name = call.name -%}
    {%- set header = 'assistant to=functions.' + call.name + '<|channel|>commentary json' -%}
    {{ written(header, call.arguments | tojson, '<|call|>') }}
  {%- elif message.role == 'assistant' -%}
    {%- set end = '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' -%}
    {{ written('assistant<|channel|>final', message.content, end) }}
  {%- endif -%}
{%- endfor -%}
{{ '<|start|>assistant' if add_generation_prompt }}
"""
