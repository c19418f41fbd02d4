"""``POST /v1/messages`` and ``/v1/messages/count_tokens``: a translation of Anthropic's API to and from chats."""
