"""The OpenAI-compatible HTTP surface."""

from pagewise_scheduler.http.app import create_app

__all__ = ["create_app"]
