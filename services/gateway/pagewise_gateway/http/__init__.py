"""The OpenAI-compatible HTTP surface."""

from pagewise_gateway.http.app import create_app
from pagewise_gateway.http.listening import listening, raise_file_limit

__all__ = ["create_app", "listening", "raise_file_limit"]
