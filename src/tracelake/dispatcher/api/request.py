"""Requests as the Dispatcher's routes read them: with its services, and with who is calling."""

from __future__ import annotations

from tracelake.contracts.token_claims import TokenClaims
from tracelake.dispatcher.api.services import DispatcherServices
from tracelake.serving import request
from tracelake.serving.request import MIB, check_size, decode_body
from tracelake.store.users import User

__all__ = ["COMPLETION_BODY", "ApiRequest", "check_size", "decode_body"]

COMPLETION_BODY = 16 * MIB
"""Completions carry manifests, which list every file."""


class ApiRequest(request.ApiRequest):
    @property
    def services(self) -> DispatcherServices:
        services: DispatcherServices = self.scope["state"]["services"]
        return services

    @property
    def user(self) -> User:
        user: User = self.caller
        return user

    @property
    def claims(self) -> TokenClaims:
        claims: TokenClaims = self.caller
        return claims
