"""The Tinker HTTP API (SDK 0.38) to commands and back. Pure: no sockets, no state, no clock."""

from collections.abc import Callable
from functools import partial

from plexrl.config import PoolConfig
from plexrl.gateway import models, own, render, sampling, training
from plexrl.gateway.refusals import NotBuilt
from plexrl.types import AnyAnswer, AnyCommand, ApiError, Capabilities, HttpRequest, HttpResponse

PREFIX = "/api/v1/"

# What the SDK knows and this pool does not have, by the first part of the path after PREFIX.
_LATER = {
    "audit": ("The audit log", "The pool's journal has it: ask the admin"),
    "auth": ("Tokens in place of the job's key", "Use TINKER_API_KEY as the job finds it"),
    "billing": ("Billing", "Ask plexrl report"),
    "checkpoints": ("Listing checkpoints", "Keep the paths that save_state returned"),
    "copy_weights": ("Copying checkpoints", "Load the checkpoint and save it again"),
    "create_custom_loss": ("Custom losses on the server", "Use forward_backward_custom with a Python function"),
    "join_sampling_session": ("Joining a sampling session", "Leave the flag sample_join_sampling_session off"),
    "retrieve_futures": ("Retrieving several futures at once", "Use retrieve_future"),
    "save_weights_external": ("Exporting weights", "Use save_state or save_weights_for_sampler"),
    "sessions": ("Listing sessions", "Ask plexrl pool status"),
    "training_runs": ("Listing training runs", "Keep the paths that save_state returned"),
    "weights_info": ("Asking about a checkpoint", "Load it: the model's get_info tells"),
    "whoami": ("Asking who one is", "You are the user who submitted the job"),
}


class TinkerGateway:
    """Translates for one pool.

    parse: request -> command for the head, or the response itself where no head is needed. Raises ApiError.
    render: the head's answer to a command -> response. render_error: a refusal -> response.
    """

    def __init__(self, config: PoolConfig) -> None:
        longest = max(model.max_context for model in config.models.values())
        self._body_bytes = config.limits.body_bytes
        settings = client_config(config)
        routes: dict[tuple[str, str], Callable[[HttpRequest], AnyCommand | HttpResponse]] = {
            ("POST", "asample"): partial(sampling.sample, max_context=longest),
            ("POST", "retrieve_future"): sampling.retrieve,
            ("POST", "forward_backward"): partial(training.forward_backward, max_context=longest),
            ("POST", "optim_step"): training.optim_step,
            ("POST", "save_weights"): training.save_weights,
            ("POST", "save_weights_for_sampler"): training.save_weights_for_sampler,
            ("POST", "load_weights"): training.load_weights,
            ("POST", "create_session"): models.open_session,
            ("POST", "session_heartbeat"): models.heartbeat,
            ("POST", "create_model"): partial(models.create_model, config=config),
            ("POST", "get_info"): models.get_info,
            ("POST", "unload_model"): models.unload_model,
            ("POST", "create_sampling_session"): sampling.open_sampler,
            ("POST", "cancel_future"): models.cancel,
            ("POST", "telemetry"): models.telemetry,
            ("GET", "get_server_capabilities"): lambda request: Capabilities(),
            ("POST", "client/config"): lambda request: render.json_response(settings),
            ("POST", "client/dynamic_config"): lambda request: render.json_response(DYNAMIC_CONFIG),
            ("GET", "healthz"): lambda request: render.json_response({"status": "ok"}),
        }
        self._routes = {(method, PREFIX + path): parse for (method, path), parse in routes.items()}
        self._routes |= own.ROUTES

    def parse(self, request: HttpRequest) -> AnyCommand | HttpResponse:
        """Raises ApiError: 400 bad input or not built, 404 unknown path, 405, 413, 415.

        A refused training call carries `.consumed`.
        """
        if len(request.body) > self._body_bytes:
            raise ApiError(
                413,
                f"The body has {len(request.body)} bytes; the pool takes {self._body_bytes}",
                "Send less at once, or ask the admin to raise limits.body_bytes",
            )
        path = request.path.partition("?")[0]
        route = self._routes.get((request.method, path))
        return route(request) if route is not None else self._rare(request, path)

    def _rare(self, request: HttpRequest, path: str) -> AnyCommand | HttpResponse:
        """Paths with an id in them, and everything that is not here."""
        parts = path.removeprefix(PREFIX).split("/")
        match (request.method, *parts):
            case ("GET", "samplers", sampler):
                return sampling.get_sampler(sampler)
            case ("POST", "sessions", session, "finish"):
                return models.finish_session(request, session)
        if path.startswith(PREFIX) and parts[0] in _LATER:
            feature, mend = _LATER[parts[0]]
            raise NotBuilt(f"{feature} ({request.method} {path[:200]})", mend, _later_status(request.method))
        allowed = sorted(method for method, known in self._routes if known == path)
        if allowed:
            raise ApiError(405, f"{request.method} {path} is not allowed", f"Use {' or '.join(allowed)}")
        raise ApiError(404, f"Unknown path {path[:200]!r}", "The pool speaks the API of the tinker SDK 0.38")

    def render(self, command: AnyCommand, answer: AnyAnswer) -> HttpResponse:
        """The response to a command. Raises TypeError when the answer is none for this command."""
        return render.render(command, answer)

    def render_error(self, error: ApiError) -> HttpResponse:
        """A refusal: `{"detail", "type", "mend"}` under its status."""
        return render.render_error(error)


def _later_status(method: str) -> int:
    """404 for reads: clients that look whether something is there take it for 'no'. 400 for everything else."""
    return 404 if method == "GET" else 400


DYNAMIC_CONFIG = {"refresh_interval_sec": 300, "sample_cancel_enabled": True}


def client_config(config: PoolConfig) -> dict[str, object]:
    """Flags for the SDK: one request per call where the body limit allows it, nothing that is not built.

    Stuck detection is off: a job may wait for its pool longer than the SDK would believe.
    """
    chunk_bytes = config.limits.body_bytes * 9 // 10
    return {
        "pjwt_auth_enabled": False,
        "parallel_fwdbwd_chunks": False,
        "proto_compress_fwdbwd": False,
        "fwdbwd_max_chunk_len": 8192,
        "fwdbwd_max_chunk_bytes_count": chunk_bytes,
        "fwdbwd_dispatch_bytes_semaphore_size": max(50_000_000, chunk_bytes),
        "sample_enable_stuck_detection": False,
        "sample_max_concurrent_requests": min(2000, config.limits.pending_calls),
        "sample_use_retrieve_futures": False,
        "sample_join_sampling_session": False,
        "custom_loss_server_side": False,
        "use_pyqwest_transport": True,
    }
