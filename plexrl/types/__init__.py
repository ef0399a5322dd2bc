"""The words of the project as frozen plain structs; every other room speaks them."""

from plexrl.types.calls import Call, CallKind, Result
from plexrl.types.errors import ApiError, BadInput, DoesNotFit, PlexrlError, Unavailable
from plexrl.types.groups import Extent, Gang, GroupSpec, Placement
from plexrl.types.http import HttpRequest, HttpResponse, Peer
from plexrl.types.memory import Moved, Slab
from plexrl.types.spans import Span, SpanClass
from plexrl.types.words import POOL_NAME, Epoch, Residency, Role

__all__ = [
    "POOL_NAME",
    "ApiError",
    "BadInput",
    "Call",
    "CallKind",
    "DoesNotFit",
    "Epoch",
    "Extent",
    "Gang",
    "GroupSpec",
    "HttpRequest",
    "HttpResponse",
    "Moved",
    "Peer",
    "Placement",
    "PlexrlError",
    "Residency",
    "Result",
    "Role",
    "Slab",
    "Span",
    "SpanClass",
    "Unavailable",
]
