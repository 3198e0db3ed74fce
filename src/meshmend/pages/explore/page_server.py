"""The explorer's web server: the page, and the answers of the planners as lines of JSON.

Loopback only; `Access` says who is refused. An answer is a stream: when the page closes the
connection, because it has a newer question, the task behind it ends.
"""

import asyncio
import hmac
import json
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from meshmend.errors import InputError
from meshmend.pages.explore.explorer_question import PAGE
from meshmend.pages.explore.live_feed import LiveFeed
from meshmend.pages.explore.planner_process import DONE, Planner, PlannerJob

_MOST_QUESTION_BYTES: Final = 1 << 20
# What a page may ask, and which planner answers.
_ASKED: Final = {
    "first": "first",
    "usual": "first",
    "search": "search",
    "heat": "search",
    "timeline": "first",
    "next-hops": "first",
    "plan-file": "first",
}


SECURITY_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@dataclass(frozen=True)
class Access:
    """The port of a server on the loopback address, and the token of this start of it.

    The token is the first part of every address, so a page of another site cannot guess one. A
    request must also name this server as its host: a name of another site that resolves to this
    machine (DNS rebinding) is refused. No answer lets other sites read it.
    """

    port: int
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)

    @property
    def address(self) -> str:
        """What to open in a browser."""
        return f"http://127.0.0.1:{self.port}/{self.token}/"

    def why_refused(self, path: str, host: str, origin: str | None) -> str:
        """Return why a request is refused, or an empty text if it is not."""
        hosts = (f"127.0.0.1:{self.port}", f"localhost:{self.port}")
        if host not in hosts:
            return "this server answers requests to its own address alone"
        if origin is not None and origin not in {f"http://{each}" for each in hosts}:
            return "this server answers its own page alone"
        given = path.lstrip("/").partition("/")[0]
        if not hmac.compare_digest(given.encode(), self.token.encode()):
            return "the address needs the token that `meshmend explore` printed"
        return ""


@dataclass(frozen=True, eq=False)
class PageServer:
    """What the server serves: `start` is what the page is told first, `feed` a job to follow.

    `niceness` is that of the planners: the higher, the less they disturb what else runs here.
    """

    start: Mapping[str, Any]
    cache_dir: Path | None
    feed: LiveFeed | None = None
    niceness: int = 0

    def run(self, port: int, on_ready: Callable[[str], None]) -> None:
        """Serve until SIGINT or SIGTERM; `on_ready` gets the address once requests are answered.

        Raises:
            InputError: the port cannot be had.
        """
        listener = _listener(port)
        access = Access(listener.getsockname()[1])
        config = uvicorn.Config(
            self._app(access, lambda: on_ready(access.address)),
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=1,
            lifespan="on",
        )
        uvicorn.Server(config).run(sockets=[listener])

    def _app(self, access: Access, on_ready: Callable[[], None]) -> ASGIApp:
        planners: dict[str, Planner] = {}
        warmth = asyncio.Event()

        @asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            loop = asyncio.get_running_loop()
            planners["first"] = Planner(niceness=self.niceness, cache_dir=self.cache_dir)
            planners["search"] = Planner(  # gives way to first answers
                niceness=min(19, self.niceness + 10), cache_dir=self.cache_dir
            )
            planners["first"].ask(
                "warm up",
                dict(self.start["question"]),
                lambda answer: loop.call_soon_threadsafe(warmth.set),
            )
            if self.feed is not None:
                self.feed.begin(loop)
            on_ready()
            yield
            for planner in planners.values():
                await asyncio.to_thread(planner.close)

        served = [
            *self._start_routes(warmth),
            *(_asking_route(planners, what, planner) for what, planner in _ASKED.items()),
            *(() if self.feed is None else _live_routes(self.feed)),
            Mount("/", StaticFiles(directory=PAGE, html=True)),
        ]
        app = Starlette(
            routes=[Mount(f"/{access.token}", routes=served)],
            lifespan=lifespan,
            exception_handlers={InputError: _bad_input},
        )
        return _Guard(app, access)

    def _start_routes(self, warmth: asyncio.Event) -> list[Route]:
        async def start(request: Request) -> Response:
            return JSONResponse(dict(self.start) | {"warm": warmth.is_set()})

        async def warm(request: Request) -> Response:
            await warmth.wait()
            return JSONResponse({"warm": True})

        return [Route("/start", start), Route("/warm", warm)]


def _asking_route(planners: Mapping[str, Planner], what: str, planner: str) -> Route:
    async def ask(request: Request) -> Response:
        question = await _question(request)
        return StreamingResponse(
            _answers(planners[planner], what, question), media_type="application/x-ndjson"
        )

    return Route(f"/{what}", ask, methods=["POST"])


def _live_routes(feed: LiveFeed) -> list[Route]:
    async def live(request: Request) -> Response:
        return StreamingResponse(feed.news(), media_type="application/x-ndjson")

    async def fault(request: Request) -> Response:
        feed.inject(await _question(request))
        return JSONResponse({"kind": "injected"})

    return [Route("/live", live), Route("/fault", fault, methods=["POST"])]


class _Guard:
    """Refuses strangers, and adds to every answer what keeps other sites out."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        headers = request.headers
        why = self._access.why_refused(
            scope["path"], headers.get("host", ""), headers.get("origin")
        )

        async def guarded(message: Any) -> None:
            if message["type"] == "http.response.start":
                added = [(k.lower().encode(), v.encode()) for k, v in SECURITY_HEADERS.items()]
                message["headers"] = [*message.get("headers", []), *added]
            await send(message)

        app = PlainTextResponse(f"{why}\n", status_code=403) if why else self._app
        await app(scope, receive, guarded)


async def _bad_input(request: Request, error: Exception) -> Response:
    return JSONResponse({"kind": "error", "why": str(error)}, status_code=400)


async def _question(request: Request) -> dict[str, Any]:
    """Return the JSON object of a request.

    Raises:
        InputError: it is too long, or no JSON object.
    """
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > _MOST_QUESTION_BYTES:
            raise InputError(f"a question needs to be below {_MOST_QUESTION_BYTES} bytes")
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise InputError("a question needs to be a JSON object")
    return document


async def _answers(planner: Planner, what: str, question: dict[str, Any]) -> AsyncIterator[bytes]:
    """Yield the answers of a planner as lines; its task ends if nobody reads them any more."""
    loop = asyncio.get_running_loop()
    arrived: asyncio.Queue[bytes] = asyncio.Queue()
    job: PlannerJob = planner.ask(
        what, question, lambda answer: loop.call_soon_threadsafe(arrived.put_nowait, answer)
    )
    try:
        while (answer := await arrived.get()) != DONE:
            yield answer + b"\n"
    finally:
        job.is_stale.set()


def _listener(port: int) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise InputError(
            f"cannot listen on port {port} of this machine: {error}; choose another --port, or "
            "none for a free one"
        ) from None
    return listener
