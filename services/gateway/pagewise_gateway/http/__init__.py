"""The OpenAI-compatible HTTP surface."""

from pagewise_gateway.http.adapters import read_modules
from pagewise_gateway.http.app import create_app
from pagewise_gateway.http.credentials import load_certificate
from pagewise_gateway.http.listening import listening, most_connections

__all__ = ["create_app", "listening", "load_certificate", "most_connections", "read_modules"]
