"""Refusals as the SDK wants them: which status means what to it is in the comments."""

import msgspec
import pydantic

from plexrl.types import ApiError


class NotBuilt(ApiError):
    """A part of the API that this pool does not have. 400: the SDK raises BadRequestError and does not retry."""

    kind = "not_built"

    def __init__(self, feature: str, mend: str, status: int = 400) -> None:
        super().__init__(status, f"{feature} is not built in this version of PlexRL", mend)


def bad(what: str, mend: str) -> ApiError:
    """The caller's input is wrong (400)."""
    return ApiError(400, what, mend)


def malformed(error: Exception) -> ApiError:
    """From a decoder's error to a refusal that names the field."""
    if isinstance(error, msgspec.ValidationError):
        return bad(f"The request does not follow the Tinker API: {error}", "Use the tinker SDK 0.38")
    if isinstance(error, pydantic.ValidationError):
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        if first["type"] != "json_invalid":
            return bad(
                f"The request does not follow the Tinker API: {first['msg']} - at `{where}`", "Use the tinker SDK 0.38"
            )
        return bad(f"The request's body is malformed JSON: {first['msg']}", "Send the JSON that the tinker SDK sends")
    return bad(f"The request's body is malformed JSON: {error}", "Send the JSON that the tinker SDK sends")
