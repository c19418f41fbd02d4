"""``POST /v1/responses``: a translation to and from chats."""
