"""A caller as the contract asks for one: it says a thing, on whichever replica, until there is an answer.

Connections that break and 503 with a reason are what faults look like from here; any other 5xx is a surprise,
and is kept in the ledger as one.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from tracelake.testing.dispatcher_process import DispatcherProcess

PATIENCE = 180.0
_PAUSE = 0.05

Port = Literal["user", "internal"]


@dataclass(slots=True)
class Ledger:
    """``completions`` are tasks whose completion was acknowledged, with the attempt that was."""

    scopes: list[tuple[int, int]] = field(default_factory=list)
    highest_tick: int = -1
    completions: dict[str, int] = field(default_factory=dict)
    refusals: Counter[str] = field(default_factory=Counter)
    repeats: Counter[str] = field(default_factory=Counter)
    surprises: list[str] = field(default_factory=list)


class Caller:
    """Says a thing until somebody answers."""

    def __init__(self, replicas: Sequence[DispatcherProcess], ledger: Ledger, seed: int) -> None:
        self._replicas = replicas
        self._ledger = ledger
        self._random = random.Random(seed)
        self._http = httpx.AsyncClient(timeout=httpx.Timeout(3.0), trust_env=False)

    async def close(self) -> None:
        await self._http.aclose()

    async def ask(self, port: Port, path: str) -> httpx.Response:
        return await self._until_answered("GET", port, path)

    async def say(
        self, port: Port, path: str, *, json: object = None, content: str | None = None
    ) -> httpx.Response:
        return await self._until_answered("POST", port, path, json=json, content=content)

    async def _until_answered(self, method: str, port: Port, path: str, **body: Any) -> httpx.Response:
        async with asyncio.timeout(PATIENCE):
            while True:
                replica = self._random.choice(self._replicas)
                internal = port == "internal"
                base = replica.internal_url if internal else replica.user_url
                headers = replica.worker_headers if internal else replica.user_headers
                try:
                    answer = await self._http.request(method, base + path, headers=headers, **body)
                except httpx.TransportError as error:
                    self._ledger.repeats[type(error).__name__] += 1
                else:
                    if answer.status_code < 500:
                        return answer
                    self._note(path, answer)
                await asyncio.sleep(_PAUSE)

    def _note(self, path: str, answer: httpx.Response) -> None:
        problem = answer.headers.get("content-type", "").startswith("application/problem+json")
        if answer.status_code == 503 and problem:
            self._ledger.repeats[answer.json()["reason"]] += 1
        else:
            self._ledger.surprises.append(f"{path}: {answer.status_code} {answer.text[:300]}")
