"""What the Query Service's routes are given besides what every surface has, and requests that carry it."""

from __future__ import annotations

from dataclasses import dataclass

from tracelake.query.authentication import Asker
from tracelake.query.run_query import QueryRunner
from tracelake.serving import request
from tracelake.serving.services import Services


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryServices(Services):
    runner: QueryRunner


class QueryApiRequest(request.ApiRequest):
    @property
    def services(self) -> QueryServices:
        services: QueryServices = self.scope["state"]["services"]
        return services

    @property
    def asker(self) -> Asker:
        asker: Asker = self.caller
        return asker
