"""A worker registers while it runs, says when it leaves, and lets no refusal or outage keep it from its work."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from tracelake.contracts.dispatcher_api import WorkerRegistration
from tracelake.domain.errors import NotFound
from tracelake.leases import presence
from tracelake.leases.dispatcher_client import DispatcherClient

SELF = WorkerRegistration("w1", "ecs_python", 2)
WAIT = 30.0


class Dispatcher:
    def __init__(self, *, refuses: bool = False, hangs: bool = False) -> None:
        self.received: list[WorkerRegistration] = []
        self.came = asyncio.Event()
        self._refuses, self._hangs = refuses, hangs

    async def register_worker(self, registration: WorkerRegistration) -> None:
        self.received.append(registration)
        if len(self.received) >= 2:
            self.came.set()
        if self._hangs:
            await asyncio.Event().wait()
        if self._refuses:
            raise NotFound("NotFound", "an older release")


def client(dispatcher: Dispatcher) -> DispatcherClient:
    return cast(DispatcherClient, dispatcher)


async def test_it_is_repeated_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "WORKER_SEEN_SECONDS", 0.0)
    dispatcher = Dispatcher()
    async with presence.registered(client(dispatcher), SELF), asyncio.timeout(WAIT):
        await dispatcher.came.wait()
    assert dispatcher.received[0] == SELF
    assert dispatcher.received[-1].leaving


async def test_a_dispatcher_that_knows_no_registrations_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(presence, "WORKER_SEEN_SECONDS", 0.0)
    dispatcher = Dispatcher(refuses=True)
    async with presence.registered(client(dispatcher), SELF), asyncio.timeout(WAIT):
        await dispatcher.came.wait()


async def test_a_dispatcher_that_does_not_answer_delays_neither_begin_nor_end() -> None:
    dispatcher = Dispatcher(hangs=True)
    async with asyncio.timeout(WAIT), presence.registered(client(dispatcher), SELF):
        pass
    assert dispatcher.received[-1].leaving
