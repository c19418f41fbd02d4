"""Errors as Anthropic's clients read them. They have OpenAI's fields as well."""

import msgspec
from aiohttp import web

from pagewise_gateway.http.context import CLIENT_REQUEST_ID, is_messages
from pagewise_gateway.http.errors import APIError, UnknownParameterError
from pagewise_gateway.http.messages_api.schema import MessageError, MessageErrorDetail

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Anthropic's types of errors by status; others below 500 are invalid_request_error, the rest api_error."""

_NAMES = {"max_completion_tokens": "max_tokens", "response_format": "output_config.format"}
"""The fields of a chat that have other names here."""


def error_detail(error: APIError) -> MessageErrorDetail:
    """Return the detail of an error."""
    kind = _TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    if not isinstance(error, UnknownParameterError):  # that one names the field that the client sent
        error.rename(_NAMES)
    detail = MessageErrorDetail(kind, str(error), error.param, error.code)
    # By this the tool runner of Anthropic's SDK knows that it has to send all messages each time.
    if error.param == "thread":
        detail.details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return detail


def error_response(request: web.Request, error: APIError) -> web.Response:
    """Return the response for an error, in the shape of the API that the request is for."""
    response = error.response()
    if is_messages(request):
        response.body = msgspec.json.encode(MessageError(error_detail(error), request[CLIENT_REQUEST_ID]))
    return response
