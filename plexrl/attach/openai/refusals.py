"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`."""

import msgspec

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
JSON = {"content-type": "application/json"}


class Refusal(Exception):
    """A request is not answered. param: the field at fault. after_s: when the SDK may try again (429, 5xx)."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, after_s: float = 0
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.after_s = after_s

    @property
    def body(self) -> bytes:
        """As JSON."""
        kind = "server_error" if self.status >= 500 else _TYPES.get(self.status, "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    @property
    def headers(self) -> dict[str, str]:
        """Of the response."""
        return JSON | ({"retry-after": f"{self.after_s:g}"} if self.after_s else {})


def not_built(what: str, param: str, mend: str = "Leave it out") -> Refusal:
    """A part of OpenAI's API that a pool does not have."""
    return Refusal(400, f"{what} is not built in this version of PlexRL. {mend}", param, "unsupported_parameter")


def bad(what: str, param: str | None, mend: str = "") -> Refusal:
    """The request is wrong."""
    return Refusal(400, f"{what}. {mend}" if mend else what, param, "invalid_value")
