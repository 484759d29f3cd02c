"""The routes, and what every request goes through: its id, its key, its line in the log."""

import asyncio
import contextlib
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib import resources

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tfbig.serve_config import ServeConfig
from tfbig.serving.access_log import log, request_id
from tfbig.serving.admission import check_crowd, check_host, check_key
from tfbig.serving.endpoints import CLIENT_LEFT, Endpoints, json_response
from tfbig.serving.errors import RequestError
from tfbig.serving.metrics import Metrics
from tfbig.serving.ranks import IDLE_SECONDS
from tfbig.serving.requests import Limits, RequestReader
from tfbig.serving.runner import Runner
from tfbig.serving.served_model import ServedModel

# The page runs its own script and style and talks to its own server, and nothing else.
PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline';"
    " connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'"
)
Handler = Callable[[Request], Awaitable[Response]]


class Server:
    """One model behind HTTP.

    Args:
      model: that answers.
      config: limits.

    Attributes:
      app: for an ASGI server; its lifespan starts and ends the thread that writes.
    """

    def __init__(self, model: ServedModel, config: ServeConfig) -> None:
        self._model, self._config = model, config
        self._metrics = Metrics()
        self._started = int(time.time())
        self._runner = Runner(
            lambda: model.make_engine(config.num_rows),
            config.queue_size,
            self._metrics.step,
            getattr(model.trainer, "rest", None),
            IDLE_SECONDS,
        )
        limits = Limits(
            model.max_length,
            config.max_tokens_limit or model.max_length,
            config.max_choices,
            model.most_prompt_bytes(),
        )
        reader = RequestReader(
            model.tokenizer, model.chat_encoder(), model.template, limits, model.name
        )
        endpoints = Endpoints(model, self._runner, reader, config, self._metrics)
        routes = [
            self._route("/v1/completions", "POST", endpoints.completions, True),
            self._route("/v1/chat/completions", "POST", endpoints.chat, True),
            self._route("/invocations", "POST", endpoints.invocations, True),
            self._route("/v1/models", "GET", self._models, True),
            self._route("/v1/models/{name:path}", "GET", self._one_model, True),
            self._route("/ping", "GET", self._health, False),
            self._route("/health", "GET", self._health, False),
            self._route("/metrics", "GET", self._metrics_page, False),
            self._route("/", "GET", self._page, False),
        ]
        self.app = RequestLog(
            Starlette(
                routes=routes,
                lifespan=self._lifespan,
                exception_handlers={
                    HTTPException: _http_error,
                    RequestError: _request_error,
                    ClientDisconnect: _client_left,
                    Exception: _fault,
                },
            ),
            self._metrics,
            [route.path for route in routes],
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self._runner.start()
        yield
        self._runner.stop(timeout=5.0)

    def _route(self, path: str, method: str, handler: Handler, needs_key: bool) -> Route:
        async def guarded(request: Request) -> Response:
            check_host(request, self._config.host, self._config.allowed_hosts)
            if needs_key:
                check_key(request, self._config.api_key)
                check_crowd(request)  # probes and metrics are answered all the same
            return await handler(request)

        return Route(path, guarded, methods=[method])

    async def _models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [self._description()]})

    async def _one_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self._model.name:
            raise RequestError(
                f"there is no model {name[:80]!r} here, only {self._model.name!r}.",
                404,
                code="model_not_found",
            )
        return json_response(self._description())

    def _description(self) -> dict[str, object]:
        return {
            "id": self._model.name,
            "object": "model",
            "created": self._started,
            "owned_by": "tfbig",
            "max_model_len": self._model.max_length,
            "card": self._model.card,
        }

    async def _health(self, request: Request) -> Response:
        if not self._runner.healthy:
            raise RequestError("the thread that writes has ended.", 503, "api_error")
        return json_response({"status": "ok"})

    async def _metrics_page(self, request: Request) -> Response:
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")

    async def _page(self, request: Request) -> Response:
        text = resources.files("tfbig.serving").joinpath("page.html").read_text(encoding="utf-8")
        headers = {"Content-Security-Policy": PAGE_POLICY, "X-Content-Type-Options": "nosniff"}
        return HTMLResponse(text, headers=headers)


async def _request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return json_response(error.body(), error.status, error.headers)


async def _http_error(request: Request, error: Exception) -> Response:
    """What the router raises: no such path, or another method."""
    assert isinstance(error, HTTPException)
    method, path = request.method, request.url.path[:80]
    what = {404: f"there is nothing at {path!r}.", 405: f"{path!r} takes no {method[:20]}."}
    found = RequestError(what.get(error.status_code, str(error.detail)), error.status_code)
    return json_response(found.body(), found.status, dict(error.headers or {}))


async def _fault(request: Request, error: Exception) -> Response:
    """What nothing else has caught; it is raised on, into the log."""
    found = RequestError("the server failed; its log says how.", 500, "api_error")
    return json_response(found.body(), 500)


async def _client_left(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_LEFT)


class RequestLog:
    """Gives every request an id, a line in the log and a place in the metrics.

    Args:
      app: that answers.
      metrics: that are kept.
      paths: that are counted by name; all others are one.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: list[str]) -> None:
        self._app, self._metrics, self._paths = app, metrics, set(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.monotonic()
        headers = dict(scope["headers"])
        own_id = request_id(headers.get(b"x-request-id", b"").decode("latin-1"))
        status = 500
        began = False
        state = scope.setdefault("state", {})
        stream_status: list[int] = []
        state |= {"request_id": own_id, "fields": {}, "log_stream": stream_status.append}

        async def send_with_id(message) -> None:
            nonlocal status, began
            if message["type"] == "http.response.start":
                status, began = message["status"], True
                if not any(name == b"x-request-id" for name, _ in message["headers"]):
                    message["headers"] = [
                        *message["headers"],
                        (b"x-request-id", own_id.encode()),
                    ]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:  # answered already, see _fault
            log(
                "fault",
                request_id=own_id,
                path=scope["path"][:200],
                traceback=traceback.format_exc(),
            )
        except asyncio.CancelledError:  # the time for what was under way is over
            if not began:
                error = RequestError("the server is stopping.", 503, "api_error", code="stopping")
                await json_response(error.body(), 503)(scope, receive, send_with_id)
        finally:
            self._record(scope, stream_status[-1] if stream_status else status, start)

    def _record(self, scope: Scope, status: int, start: float) -> None:
        seconds = time.monotonic() - start
        path = scope["path"]
        path = path if path in self._paths else "other"
        self._metrics.requests.labels(path, str(status)).inc()
        self._metrics.request_seconds.labels(path).observe(seconds)
        client = scope.get("client")
        log(
            "request",
            request_id=scope["state"]["request_id"],
            client=client[0] if client else None,
            method=scope["method"][:20],
            path=scope["path"][:200],
            status=status,
            seconds=seconds,
            **scope["state"]["fields"],
        )
