"""Errors of the text layer.

PagewiseError
├── ModelError              (of pagewise_shared) the model's tokenizer is missing or unreadable
└── ChatTemplateError       a conversation cannot be rendered
    └── NoChatTemplateError     the model has no chat template at all
"""

from pagewise_shared.errors import PagewiseError


class ChatTemplateError(PagewiseError):
    """A conversation cannot be rendered with the model's chat template; the text says why."""


class NoChatTemplateError(ChatTemplateError):
    """The model has no chat template."""
