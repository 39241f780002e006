"""Routes and the router that finds them: a route is declared once, serves requests and describes itself in OpenAPI.

A path is fixed, or a template with ``{name}`` for whole segments. Fixed paths are looked up in a table; templates
with the same number of segments are compared one by one, in the order of their declaration.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tracelake.domain.errors import MethodNotAllowed, NotFound
from tracelake.serving.identity import Identity
from tracelake.serving.response import Response

Handler = Callable[..., Awaitable[Response]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """The contract of a route.

    ``answers`` maps a status to its body: a type stands for JSON of that type, a string for a media type, a tuple
    for one of several. ``body`` is written likewise. ``refusals`` lists the statuses that follow from what the
    route does; the OpenAPI document adds those that follow from its shape (no credential, a malformed body).
    ``seconds`` replaces the surface's time limit, for calls that move a whole file.
    """

    identity: Identity
    answers: dict[int, Any]
    body: Any = None
    body_required: bool = True
    query: type | None = None
    refusals: tuple[int, ...] = ()
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Route:
    method: str
    path: str
    operation: Operation
    handler: Handler


def endpoint(method: Literal["GET", "POST"], path: str, operation: Operation) -> Callable[[Handler], Route]:
    """Decorates a handler; its name and the first line of its docstring go into the OpenAPI document."""

    def register(handler: Handler) -> Route:
        return Route(method, path, operation, handler)

    return register


@dataclass(frozen=True, slots=True)
class _Template:
    segments: tuple[str, ...]
    """Each is a parameter's name in braces, or the text that must stand there."""
    methods: dict[str, Route]

    def match(self, segments: list[str]) -> dict[str, str] | None:
        found = {}
        for wanted, given in zip(self.segments, segments, strict=True):
            if wanted.startswith("{"):
                found[wanted[1:-1]] = given
            elif wanted != given:
                return None
        return found


class Router:
    def __init__(self, routes: Iterable[Route]) -> None:
        self.routes = tuple(routes)
        self._fixed: dict[str, dict[str, Route]] = {}
        self._templates: dict[int, list[_Template]] = {}
        templates: dict[str, _Template] = {}
        for route in self.routes:
            if "{" not in route.path:
                methods = self._fixed.setdefault(route.path, {})
            else:
                template = templates.get(route.path)
                if template is None:
                    template = templates[route.path] = _Template(tuple(route.path.split("/")), {})
                    self._templates.setdefault(len(template.segments), []).append(template)
                methods = template.methods
            if route.method in methods:
                # The second one would silently replace the first,
                # and with it perhaps the credential it asks for.
                raise ValueError(f"{route.method} {route.path} is declared twice")
            methods[route.method] = route

    def find(self, method: str, path: str) -> tuple[Route, Mapping[str, str]]:
        """The route and its path parameters. Raises ``NotFound`` or ``MethodNotAllowed``."""
        methods = self._fixed.get(path)
        if methods is not None and method in methods:
            return methods[method], {}
        # Only paths that aren't found as they are pay for being put in order.
        return self._find_any(method, "/" + "/".join(each for each in path.split("/") if each))

    def _find_any(self, method: str, path: str) -> tuple[Route, Mapping[str, str]]:
        """Among fixed paths and templates; ``path`` has no doubled slashes and none at its end."""
        methods, parameters = self._fixed.get(path), {}
        if methods is None:
            segments = path.split("/")
            for template in self._templates.get(len(segments), ()):
                found = template.match(segments)
                if found is not None:
                    methods, parameters = template.methods, found
                    break
            else:
                raise NotFound("NotFound", "Not Found")
        if method not in methods:
            raise MethodNotAllowed("MethodNotAllowed", "Method Not Allowed", methods)
        return methods[method], parameters
