"""An engine that answers with the bodies that vLLM answers with, and remembers what it was asked."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web


class StubEngine:
    """``fail[route]`` = how many of the next requests for it end with 500."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fail: dict[str, int] = {}
        self.version = "default"
        self.path = ""
        self.loaded = ""
        self.paused = False
        self.url = ""

    async def handle(self, request: web.Request) -> web.Response:
        """Any route."""
        route = request.path
        if route != "/weight_info":
            self.calls.append(request.path_qs)
        if self.fail.get(route, 0) > 0:
            self.fail[route] -= 1
            return web.json_response({"error": {"message": "collective_rpc failed", "code": 500}}, status=500)
        body = await request.json() if request.can_read_body else {}
        match route:
            case "/weight_info":
                return web.json_response({"weight_version": self.version})
            case "/pause":
                self.paused = True
                return web.json_response({"status": "paused"})
            case "/resume":
                self.paused = False
                return web.json_response({"status": "resumed"})
            case "/start_weight_update":
                return web.json_response({"message": "Weight update started"})
            case "/update_weights":
                self.loaded = body["update_info"]["path"]
                return web.json_response({"message": "Weights updated"})
            case "/finish_weight_update":
                self.version, self.path = body["weight_version"], self.loaded
                return web.json_response({"message": "Weight update finished"})
            case _:
                return web.Response(status=404)


@asynccontextmanager
async def serving(handler, port: int = 0) -> AsyncIterator[str]:
    """Serve ``handler`` for every route; yields the URL."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
