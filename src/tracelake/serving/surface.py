"""A port's application, built from its routes: none of them asks for a credential that the port can't check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from litestar import Litestar
from litestar.handlers import HTTPRouteHandler

from tracelake.serving.edge import Surface
from tracelake.serving.http_metrics import HttpMetrics
from tracelake.serving.identity import IDENTITY, Authentication, Authenticator, Identity
from tracelake.serving.openapi import document
from tracelake.serving.problems import framework_refusal
from tracelake.serving.request import ApiRequest
from tracelake.serving.services import Services


def build_surface(
    name: str,
    routes: Sequence[HTTPRouteHandler],
    authenticators: Mapping[Identity, Authenticator],
    services: Services,
    request_class: type[ApiRequest],
    metrics: HttpMetrics,
    timeout: float,
) -> Surface:
    for route in routes:
        identity = route.opt[IDENTITY]
        if identity is not Identity.NOBODY and identity not in authenticators:
            raise ValueError(f"{route.paths}: the {name} port can't authenticate a {identity}")
    authentication = Authentication(authenticators)
    litestar = _litestar(routes, authentication, request_class)
    return Surface(name, litestar, authentication, services, request_class, metrics, timeout)


def describe_routes(title: str, routes: Sequence[HTTPRouteHandler], request_class: type[ApiRequest]) -> bytes:
    """The OpenAPI document of a port without serving it."""
    return document(title, _litestar(routes, Authentication({}), request_class).routes)


def _litestar(
    routes: Sequence[HTTPRouteHandler], authentication: Authentication, request_class: type[ApiRequest]
) -> Litestar:
    return Litestar(
        routes,
        guards=[authentication.guard],
        request_class=request_class,
        exception_handlers={Exception: framework_refusal},
        openapi_config=None,
        logging_config=None,
        debug=False,
    )
