"""The outermost layer of a surface: measures every request, bounds its time, hands the services in.

Paths without parameters, the hot ones among them, are answered right here: the same credential check, route
function and refusals as the framework would run, without its routing, argument models and response classes,
which are two thirds of what a request costs. Everything else goes through the framework.
"""

from __future__ import annotations

import asyncio
from time import perf_counter
from typing import Any

from litestar import Litestar
from litestar.types import HTTPScope, Message, Receive, Send

from tracelake.serving.endpoint import Handler
from tracelake.serving.http_metrics import HttpMetrics
from tracelake.serving.identity import Authentication, Identity
from tracelake.serving.openapi import declared
from tracelake.serving.problems import problem, problem_answer, refusal
from tracelake.serving.request import ApiRequest
from tracelake.serving.services import Services


class Surface:
    """One port's application."""

    def __init__(
        self,
        name: str,
        litestar: Litestar,
        authentication: Authentication,
        services: Services,
        request_class: type[ApiRequest],
        metrics: HttpMetrics,
        timeout: float,
    ) -> None:
        self.litestar = litestar
        self.services = services
        self._name = name
        self._request_class = request_class
        self._authentication = authentication
        self._metrics = metrics
        self._timeout = timeout
        self._direct: dict[tuple[str, str], tuple[Identity, Handler, float]] = {
            (method, path): (operation.identity, handler.fn, operation.seconds or timeout)
            for path, method, handler, operation in declared(litestar.routes)
            if "{" not in path
        }

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await self._serve(scope, receive, send)
        else:
            await self.litestar(scope, receive, send)

    async def _serve(self, scope: HTTPScope, receive: Receive, send: Send) -> None:
        began = perf_counter()
        status = 0

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        scope.setdefault("state", {})["services"] = self.services
        direct = self._direct.get((scope["method"], scope["path"]))
        seconds = self._timeout if direct is None else direct[2]
        try:
            async with asyncio.timeout(seconds):
                if direct is None:
                    await self.litestar(scope, receive, watched)
                else:
                    await self._answer(direct[0], direct[1], scope, receive, watched)
        except TimeoutError:
            if status:
                raise
            late = problem(503, "Timeout", f"not answered within {seconds:g} seconds")
            await problem_answer(late)(scope, receive, watched)
        finally:
            known = "path_template" in scope
            method = scope["method"] if known else "any"
            route = scope["path_template"] if known else "unmatched"
            self._metrics.record(self._name, method, route, status, perf_counter() - began)

    async def _answer(
        self, identity: Identity, handler: Handler, scope: HTTPScope, receive: Receive, send: Send
    ) -> None:
        scope["path_template"] = scope["path"]
        try:
            await self._authentication.check(scope, identity)
            answer = await handler(self._request_class(scope, receive, send))
        except Exception as error:
            answer = refusal(error, identity, scope["method"], scope["path"])
        await answer(scope, receive, send)
