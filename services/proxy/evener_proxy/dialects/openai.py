"""What both dialects of OpenAI share: one error envelope and one list of models. Called by `chat` and `responses`.

Source: the OpenAI API reference, "Error codes" and "Models".
"""

from typing import Any

import msgspec

from evener_proxy.canonical import CallError, ModelInfo

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "requests",
}
_encode = msgspec.json.Encoder().encode


def error_fields(error: CallError) -> dict[str, Any]:
    """Message, type, param and code."""
    kind = _TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    return {"message": error.message, "type": kind, "param": error.param, "code": error.code}


def error_envelope(error: CallError) -> bytes:
    """The body of a response with an error status."""
    return _encode({"error": error_fields(error)})


def model_list(model: ModelInfo) -> bytes:
    """A ``list`` of one."""
    return _encode({"object": "list", "data": [_model(model)]})


def model_document(model: ModelInfo) -> bytes:
    """A ``model``."""
    return _encode(_model(model))


def _model(model: ModelInfo) -> dict[str, Any]:
    return {"id": model.name, "object": "model", "created": int(model.opened), "owned_by": "evener"}
