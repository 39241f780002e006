"""Webhooks under attack: who may deliver, that each delivery counts once, and what a caller can't do."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest
import pytest_asyncio
from standardwebhooks import Webhook

from tests.support.conversation import Conversation, dag, reactive, source
from tests.support.surfaces import Surfaces, open_surfaces
from tracelake.contracts.sources import MAX_HOOK_BYTES, SecretRequest
from tracelake.dispatcher.api import sources as api
from tracelake.dispatcher.steps.accept_delivery import accept_delivery, collect_bodies, show_secret
from tracelake.dispatcher.steps.context import HookLimits, StepContext
from tracelake.dispatcher.steps.interventions import pause_job, resume_job
from tracelake.dispatcher.steps.source_requests import route_waiting
from tracelake.domain.dag.model import Signature
from tracelake.domain.errors import Conflict, Unauthenticated, Unavailable
from tracelake.domain.webhooks import judge_call, new_secret
from tracelake.objects.base import ObjectLocation, ObjectStore
from tracelake.serving.listener import Listener

PATH = "/v1/hooks/chain/src"
CODE = {"operator": "own", "runtime": "ecs_python"}


@pytest.fixture
def talk(ctx: StepContext) -> Conversation:
    return Conversation(ctx)


@pytest_asyncio.fixture
async def ports(ctx: StepContext) -> AsyncIterator[Surfaces]:
    async with open_surfaces(ctx) as opened:
        yield opened


class ObjectStoreOf:
    """The object store of a context, of which a test replaces a part."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


def hook(signature: str = "standard", **fields: Any) -> dict[str, Any]:
    how: dict[str, Any] = {"kind": "webhook", "signature": signature}
    return {**source("src", **fields), "source": how}


async def deployed(talk: Conversation, signature: str = "standard", **fields: Any) -> str:
    await talk.deploy(dag(hook(signature, **fields), reactive("work", "src", strategy="PerUpdate")))
    return await secret_of(talk)


async def secret_of(talk: Conversation, *, rotate: bool = False, overlap: int = 3600) -> str:
    shown = await show_secret(talk.ctx, "chain", "src", SecretRequest(rotate, overlap), "tester")
    assert shown.secret not in repr(shown)
    return shown.secret


def signed(secret: str, body: bytes, message_id: str = "msg_1", at: float | None = None) -> dict[str, str]:
    """Headers by the specification's own library."""
    moment = datetime.fromtimestamp(time.time() if at is None else at, UTC)
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(int(moment.timestamp())),
        "webhook-signature": Webhook(secret).sign(message_id, moment, body.decode("latin-1")),
    }


async def call(ports: Surfaces, body: bytes, headers: dict[str, str], path: str = PATH) -> httpx.Response:
    return await ports.user.post(path, content=body, headers=headers)


async def test_a_signed_call_is_one_event_whose_cursor_is_its_number(
    talk: Conversation, ports: Surfaces
) -> None:
    secret = await deployed(talk)
    for number in (1, 2):
        body = b'{"n": %d}' % number
        answer = await call(ports, body, signed(secret, body, f"msg_{number}"))
        assert (answer.status_code, answer.json()) == (202, {"number": number, "known": False, "kept": False})
    again = await call(ports, b"{}", signed(secret, b"{}", "msg_1"))
    assert (again.status_code, again.json()["number"], again.json()["known"]) == (200, 1, True)
    assert [row["range_end"] for row in await talk.events()] == [1, 2]
    assert (await talk.lease("work")).read.upto == 2


async def test_a_delivery_that_comes_twice_at_once_counts_once(talk: Conversation, ports: Surfaces) -> None:
    secret = await deployed(talk)
    headers = signed(secret, b"{}")
    answers = await asyncio.gather(*(call(ports, b"{}", headers) for _ in range(8)))
    assert sorted(answer.status_code for answer in answers) == [200] * 7 + [202]
    assert {answer.json()["number"] for answer in answers} == {1}
    assert len(await talk.events()) == 1


@pytest.mark.parametrize(
    ("changes", "status", "reason"),
    [
        ({"webhook-signature": "v1,AAAA"}, 401, "WrongSignature"),
        ({"webhook-id": "msg_2"}, 401, "WrongSignature"),
        ({"webhook-signature": None}, 401, "SignatureMissing"),
        ({"webhook-id": None, "webhook-timestamp": None, "webhook-signature": None}, 401, "SignatureMissing"),
        ({"webhook-timestamp": "yesterday"}, 401, "MalformedSignature"),
        ({"webhook-id": "a.b"}, 401, "MalformedSignature"),
        ({"webhook-signature": "v1,x " * 40}, 401, "MalformedSignature"),
        ({"authorization": "Bearer tlu_" + "x" * 43, "webhook-signature": None}, 401, "SignatureMissing"),
    ],
)
async def test_a_call_that_is_not_signed_is_refused_and_leaves_nothing(
    talk: Conversation, ports: Surfaces, changes: dict[str, str | None], status: int, reason: str
) -> None:
    secret = await deployed(talk)
    headers = {k: v for k, v in {**signed(secret, b"{}"), **changes}.items() if v is not None}
    before = await talk.everything()
    answer = await call(ports, b"{}", headers)
    assert (answer.status_code, answer.json()["reason"]) == (status, reason)
    assert (await call(ports, b"{ }", signed(secret, b"{}"))).status_code == 401, "another body"
    assert await talk.everything() == before
    assert await talk.query("SELECT 1 FROM source_request") == []


async def test_an_old_call_and_one_from_the_future_are_refused(talk: Conversation, ports: Surfaces) -> None:
    secret = await deployed(talk)
    for at in (time.time() - 3600, time.time() + 3600):
        answer = await call(ports, b"{}", signed(secret, b"{}", at=at))
        assert (answer.status_code, answer.json()["reason"]) == (400, "StaleDelivery")
    # Without the secret nothing is learnt about time.
    forged = signed(new_secret(), b"{}", at=time.time() - 3600)
    assert (await call(ports, b"{}", forged)).status_code == 401


async def test_an_unknown_source_costs_the_same_work_as_a_wrong_signature(
    talk: Conversation, ports: Surfaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    await deployed(talk)
    work: list[int] = []
    digest = hmac.digest

    def counted(key: bytes, message: bytes, name: Any) -> bytes:
        work.append(len(message))
        return digest(key, message, name)

    monkeypatch.setattr("tracelake.domain.standard_webhooks.hmac.digest", counted)
    found = {}
    async with listening(ports) as port:
        for path in (PATH, "/v1/hooks/chain/gone", "/v1/hooks/else/src", "/v1/hooks/chain/work"):
            work.clear()
            async with sent(port, in_one_piece(path, b"{}", signed(new_secret(), b"{}"))) as answer:
                found[path] = (await status_of(answer), tuple(work))
    assert [status for status, _ in found.values()] == [401, 404, 404, 404]
    assert len({done for _, done in found.values()}) == 1


@asynccontextmanager
async def listening(ports: Surfaces) -> AsyncIterator[int]:
    """The user port behind a real listener."""
    listener = Listener("user", "127.0.0.1", 0)
    serving = asyncio.create_task(listener.serve(ports.user_app))
    await listener.started()
    try:
        yield int(listener.url.rpartition(":")[2])
    finally:
        listener.stop()
        await serving
        listener.close()


def head(path: str, length: int, headers: dict[str, str]) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: h", f"Content-Length: {length}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode()


def in_one_piece(path: str, body: bytes, headers: dict[str, str]) -> bytes:
    return head(path, len(body), headers) + body


@asynccontextmanager
async def sent(port: int, content: bytes, source: str = "127.0.0.1") -> AsyncIterator[asyncio.StreamReader]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(source, 0))
    writer.write(content)
    try:
        yield reader
    finally:
        writer.close()


async def status_of(reader: asyncio.StreamReader) -> int:
    async with asyncio.timeout(60):
        return int((await reader.readuntil(b"\r\n\r\n")).split()[1])


async def test_a_call_that_stops_after_its_head_does_not_learn_which_webhooks_there_are(
    talk: Conversation, ports: Surfaces
) -> None:
    secret = await deployed(talk)
    async with listening(ports) as port:
        for path in (PATH, "/v1/hooks/no/such"):
            asked = head(path, 2, {**signed(secret, b"{}"), "Expect": "100-continue"})
            async with sent(port, asked) as answer:
                assert await status_of(answer) == 100


async def test_small_calls_in_one_piece_need_no_place(
    talk: Conversation, ports: Surfaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = await deployed(talk, **CODE)
    monkeypatch.setattr(api, "HOOKS_AT_ONCE", 0)
    before = limited(talk.ctx)
    async with listening(ports) as port:
        for body, status in ((b"x" * 10_000, 202), (b"x" * 100_000, 429)):
            headers = signed(secret, body, f"msg_{len(body)}")
            async with sent(port, in_one_piece(PATH, body, headers)) as answer:
                assert await status_of(answer) == status
        async with sent(port, head(PATH, 2, signed(secret, b"{}"))) as answer:
            assert await status_of(answer) == 429
    assert limited(talk.ctx) - before == 2


def limited(ctx: StepContext) -> float:
    """How many deliveries a metric counts as answered 429."""
    labels = ctx.metrics.source_requests.labels("webhook", "limited")
    return next(sample.value for sample in labels.collect()[0].samples if sample.name.endswith("_total"))


async def test_the_addresses_of_one_user_of_this_machine_are_one_peer(
    talk: Conversation, ports: Surfaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = await deployed(talk)
    monkeypatch.setattr(api, "HOOKS_OF_PEER", 1)
    slow = head(PATH, 2, {**signed(secret, b"{}"), "Expect": "100-continue"})
    async with listening(ports) as port, sent(port, slow) as first:
        assert await status_of(first) == 100
        async with sent(port, slow, "127.0.0.2") as second:
            assert await status_of(second) == 429


class Callers:
    """Callers at addresses of their own, and calls whose bodies don't end before ``close``."""

    def __init__(self, ports: Surfaces, secret: str) -> None:
        self.ports = ports
        self.secret = secret
        self.goes_on = asyncio.Event()
        self.slow: list[asyncio.Task[int]] = []

    async def call(self, address: str, path: str, body: AsyncIterator[bytes] | bytes = b"{}") -> int:
        transport = httpx.ASGITransport(app=self.ports.user_app, client=(address, 1234))
        async with httpx.AsyncClient(transport=transport, base_url="http://dispatcher") as client:
            headers = {"Authorization": f"Bearer {self.secret}"}
            return (await client.post(path, content=body, headers=headers)).status_code

    async def begin(self, address: str, path: str) -> None:
        """Returns when the call is being read."""
        began = asyncio.Event()

        async def body() -> AsyncIterator[bytes]:
            began.set()
            yield b"{"
            await self.goes_on.wait()
            yield b"}"

        self.slow.append(asyncio.create_task(self.call(address, path, body())))
        async with asyncio.timeout(60):
            await began.wait()

    async def close(self) -> set[int]:
        self.goes_on.set()
        return {*await asyncio.gather(*self.slow)}


async def test_slow_calls_of_one_peer_or_one_source_leave_places_for_others(
    talk: Conversation, ports: Surfaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "HOOKS_OF_PEER", 2)
    monkeypatch.setattr(api, "HOOKS_OF_SOURCE", 3)
    monkeypatch.setattr(api, "HOOKS_AT_ONCE", 5)
    other = {**hook("bearer"), "name": "other"}
    await talk.deploy(dag(hook("bearer"), other, reactive("work", "src", strategy="PerUpdate")))
    secret = await secret_of(talk)
    callers, there = Callers(ports, secret), "/v1/hooks/chain/other"
    for _ in range(2):
        await callers.begin("192.0.2.1", PATH)
    assert await callers.call("192.0.2.1", PATH) == await callers.call("192.0.2.1", there) == 429
    assert await callers.call("192.0.2.2", PATH) == 202
    await callers.begin("192.0.2.2", PATH)
    assert await callers.call("192.0.2.3", PATH) == 429
    assert await callers.call("192.0.2.3", there) == 401, "another source, whose secret it doesn't have"
    await callers.begin("192.0.2.3", there)
    await callers.begin("192.0.2.4", there)
    assert await callers.call("192.0.2.5", there) == 429
    assert await callers.close() == {202, 401}
    # Every place is free again.
    again = Callers(ports, secret)
    for _ in range(2):
        await again.begin("192.0.2.1", PATH)
    assert await again.close() == {202}
    assert await callers.call("192.0.2.1", PATH) == 202


async def test_a_body_that_is_too_large_is_refused_before_it_is_read(
    talk: Conversation, ports: Surfaces
) -> None:
    secret = await deployed(talk, **CODE)
    largest = b"x" * MAX_HOOK_BYTES
    assert (await call(ports, largest, signed(secret, largest))).status_code == 202
    read = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal read
        while True:
            read += 65_536
            yield b"x" * 65_536

    answer = await ports.user.post(PATH, content=endless(), headers=signed(secret, b"", "msg_2"))
    assert answer.status_code == 413
    assert read <= MAX_HOOK_BYTES + 2 * 65_536
    announced = await ports.user.post(PATH, content=b"x" * 300 * 1024, headers=signed(secret, b"", "msg_3"))
    assert announced.status_code == 413
    assert len(await talk.query("SELECT 1 FROM source_request")) == 1


async def test_a_captured_call_is_no_other_one_with_its_time_in_the_id(
    talk: Conversation, ports: Surfaces
) -> None:
    secret = await deployed(talk)
    now = int(time.time())
    captured = signed(secret, f"{now}.rest".encode(), "msg_1", now)
    assert (await call(ports, f"{now}.rest".encode(), captured)).status_code == 202
    shifted = {**captured, "webhook-id": f"msg_1.{now}"}
    assert (await call(ports, b"rest", shifted)).status_code == 401
    assert len(await talk.events()) == 1


async def test_deliveries_beyond_the_rate_are_refused_until_time_has_passed(
    talk: Conversation, ctx: StepContext
) -> None:
    slow = replace(ctx, hook_limits=HookLimits(rate=0.5, burst=3))
    before = limited(slow)
    secret = await deployed(talk)
    async with open_surfaces(slow) as ports:
        statuses = []
        for number in range(5):
            answer = await call(ports, b"{}", signed(secret, b"{}", f"msg_{number}"))
            statuses.append(answer.status_code)
        assert statuses == [202, 202, 202, 429, 429]
        assert limited(slow) - before == 2
        assert int(answer.headers["retry-after"]) == 2
        # What isn't authentic uses nothing up, and what is known needs nothing.
        assert (await call(ports, b"{}", signed(new_secret(), b"{}"))).status_code == 401
        assert (await call(ports, b"{}", signed(secret, b"{}", "msg_0"))).status_code == 200
        await talk.pass_time(4)
        assert (await call(ports, b"{}", signed(secret, b"{}", "msg_9"))).status_code == 202


async def test_a_clock_that_is_set_back_stops_deliveries_no_longer_than_the_rate_does(
    talk: Conversation, ctx: StepContext
) -> None:
    slow = replace(ctx, hook_limits=HookLimits(rate=0.5, burst=2))
    secret = await deployed(talk)
    await talk.pass_time(86_400)

    async with open_surfaces(slow) as ports:

        async def status(number: int, ahead: float) -> int:
            headers = signed(secret, b"{}", f"msg_{number}", time.time() + ahead)
            return (await call(ports, b"{}", headers)).status_code

        assert [await status(number, 86_400) for number in range(3)] == [202, 202, 429]
        await talk.pass_time(-86_400)
        assert await status(3, 0) == 429
        await talk.pass_time(3)
        assert [await status(number, 3) for number in (4, 5)] == [202, 429]


async def test_a_clock_that_is_set_back_brings_no_secret_back(talk: Conversation, ports: Surfaces) -> None:
    leaked = await deployed(talk)
    current = await secret_of(talk, rotate=True, overlap=0)
    await talk.pass_time(-3600)
    before = time.time() - 3600
    assert (await call(ports, b"{}", signed(leaked, b"{}", "msg_1", before))).status_code == 401
    assert (await call(ports, b"{}", signed(current, b"{}", "msg_2", before))).status_code == 202
    await secret_of(talk, rotate=True, overlap=600)
    await talk.pass_time(-86_400)
    before -= 86_400
    assert (await call(ports, b"{}", signed(current, b"{}", "msg_3", before))).status_code == 401
    await talk.pass_time(86_400 + 10)
    before += 86_400 + 10
    assert (await call(ports, b"{}", signed(current, b"{}", "msg_3", before))).status_code == 202
    assert (await call(ports, b"{}", signed(leaked, b"{}", "msg_4", before))).status_code == 401


async def test_a_secret_is_shown_once_and_rotated_with_an_overlap(
    talk: Conversation, ports: Surfaces
) -> None:
    old = await deployed(talk)
    with pytest.raises(Conflict, match="shown before"):
        await secret_of(talk)
    await talk.deploy(dag(hook(priority="bulk"), reactive("work", "src", strategy="PerUpdate")))
    new = await secret_of(talk, rotate=True, overlap=60)
    assert (await call(ports, b"{}", signed(old, b"{}", "msg_1"))).status_code == 202
    assert (await call(ports, b"{}", signed(new, b"{}", "msg_2"))).status_code == 202
    await talk.pass_time(61)
    later = time.time() + 61
    assert (await call(ports, b"{}", signed(old, b"{}", "msg_3", later))).status_code == 401
    assert (await call(ports, b"{}", signed(new, b"{}", "msg_4", later))).status_code == 202
    asked = await ports.person.post("/v1/sources/chain/src/secret", json={})
    assert (asked.status_code, asked.json()["reason"]) == (409, "SecretShown")
    audit = await talk.query("SELECT action, subject::text FROM audit")
    assert [row["action"] for row in audit if "secret" in row["action"]] == ["show secret", "rotate secret"]
    assert all(secret not in row["subject"] for row in audit for secret in (old, new))


async def accepted_secrets(ports: Surfaces, *secrets: str, at: float | None = None) -> list[bool]:
    answers = [
        await call(ports, b"{}", signed(secret, b"{}", f"msg_{i}", at)) for i, secret in enumerate(secrets)
    ]
    return [answer.status_code != 401 for answer in answers]


async def test_a_rotation_without_overlap_ends_every_earlier_secret(
    talk: Conversation, ports: Surfaces
) -> None:
    leaked = await deployed(talk)
    second = await secret_of(talk, rotate=True, overlap=24 * 3600)
    assert await accepted_secrets(ports, leaked, second) == [True, True]
    third = await secret_of(talk, rotate=True, overlap=0)
    assert await accepted_secrets(ports, leaked, second, third) == [False, False, True]


async def test_a_rotation_shortens_what_earlier_ones_promised_and_extends_nothing(
    talk: Conversation, ports: Surfaces
) -> None:
    first = await deployed(talk)
    second = await secret_of(talk, rotate=True, overlap=60)
    third = await secret_of(talk, rotate=True, overlap=3600)
    await talk.pass_time(61)
    later = time.time() + 61
    assert await accepted_secrets(ports, first, second, third, at=later) == [False, True, True]
    fourth = await secret_of(talk, rotate=True, overlap=10)
    await talk.pass_time(11)
    assert await accepted_secrets(ports, second, third, fourth, at=later + 11) == [False, False, True]


async def test_a_rotation_that_would_end_a_secret_before_its_time_is_refused(
    talk: Conversation, ports: Surfaces
) -> None:
    live = [await deployed(talk)]
    live += [await secret_of(talk, rotate=True) for _ in range(2)]
    with pytest.raises(Conflict, match=r"wait until .* or end all of them with an overlap of 0") as refused:
        await secret_of(talk, rotate=True)
    assert refused.value.reason == "TooManySecrets"
    assert await accepted_secrets(ports, *live) == [True] * 3
    last = await secret_of(talk, rotate=True, overlap=0)
    assert await accepted_secrets(ports, *live, last) == [False] * 3 + [True]


async def test_a_webhook_that_leaves_its_dag_comes_back_with_another_secret(
    talk: Conversation, ports: Surfaces
) -> None:
    old = await deployed(talk)
    await talk.deploy(dag(source("src"), reactive("work", "src", strategy="PerUpdate")))
    new = await deployed(talk)
    assert await accepted_secrets(ports, old, new) == [False, True]


async def test_githubs_calls(talk: Conversation, ports: Surfaces) -> None:
    secret = await deployed(talk, "github")

    def headers(body: bytes, delivery: str, key: str = secret) -> dict[str, str]:
        digest = hmac.new(key.encode(), body, hashlib.sha256).hexdigest()
        return {"X-Hub-Signature-256": f"sha256={digest}", "X-GitHub-Delivery": delivery}

    body = b'{"action": "opened"}'
    assert (await call(ports, body, headers(body, "72d3162e"))).status_code == 202
    assert (await call(ports, body, headers(body, "72d3162e"))).status_code == 200
    assert (await call(ports, body, headers(body, "72d3162f"))).json()["number"] == 2
    assert (await call(ports, body, headers(body, "x", new_secret()))).status_code == 401
    assert (await call(ports, body + b" ", headers(body, "x"))).status_code == 401
    assert (await call(ports, body, signed(secret, body))).status_code == 401, "another scheme"
    assert (await call(ports, body, headers(body, "a b"))).status_code == 400


def test_githubs_own_example_verifies() -> None:
    given = {
        "x-hub-signature-256": "sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17",
        "x-github-delivery": "1",
    }
    key = "It's a Secret to Everybody"
    assert judge_call(Signature.GITHUB, given, b"Hello, World!", [key], 0).delivery_id == "1"
    with pytest.raises(Unauthenticated):
        judge_call(Signature.GITHUB, given, b"Hello, World?", [key], 0)


async def test_calls_with_a_bearer_token(talk: Conversation, ports: Surfaces) -> None:
    secret = await deployed(talk, "bearer")
    right = {"Authorization": f"Bearer {secret}"}
    assert [(await call(ports, b"", right)).json()["number"] for _ in range(2)] == [1, 2]
    keyed = {**right, "Idempotency-Key": "one"}
    assert [(await call(ports, b"", keyed)).status_code for _ in range(2)] == [202, 200]
    for wrong in ({}, {"Authorization": f"Basic {secret}"}, {"Authorization": f"Bearer {new_secret()}"}):
        assert (await call(ports, b"", wrong)).status_code == 401
    person = {"Authorization": f"Bearer {ports.user_token}"}
    assert (await call(ports, b"", person)).status_code == 401, "a person's token is no webhook's"


@pytest.mark.parametrize("body", [b'{"a": 1}', b"plain", b"\xff\x00binary", b"", b"y" * 100_000])
async def test_code_gets_the_delivery_with_its_body_whatever_that_is(
    talk: Conversation, ports: Surfaces, body: bytes
) -> None:
    secret = await deployed(talk, "github", **CODE)
    digest = hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()
    headers = {"X-Hub-Signature-256": f"sha256={digest}", "X-GitHub-Delivery": "d1"}
    answer = await call(ports, body, {**headers, "Content-Type": "application/json"})
    assert answer.status_code == 202
    assert await talk.events() == []
    claim = await talk.claim(await talk.only_queued("src"))
    assert claim.task is not None
    assert claim.task.source is not None
    delivery: Any = claim.task.source.delivery
    assert (delivery.number, delivery.id, delivery.bytes) == (1, "d1", len(body))
    assert delivery.content_type == "application/json"
    inline = base64.b64decode(delivery.body_base64) if delivery.body_base64 else None
    if len(body) <= 32 * 1024:
        assert (delivery.body.encode() if delivery.body is not None else inline) == body
    else:
        assert (delivery.body, inline) == (None, None)
    assert claim.capability_token is not None
    own = await ports.internal.get("/v1/task/source-body", headers=ports.task(claim.capability_token))
    assert (own.status_code, own.content) == (200, body)
    workers = await ports.worker.get(f"/internal/source-body?task_id={claim.task_id}")
    assert workers.content == body
    assert json.loads(json.dumps(answer.json())) == {"number": 1, "known": False, "kept": False}


async def bodies(ctx: StepContext) -> int:
    return len(await ctx.objects.list(ctx.objects.root))


async def test_a_large_body_that_is_not_accepted_leaves_nothing(talk: Conversation, ctx: StepContext) -> None:
    few = replace(ctx, hook_limits=HookLimits(rate=0.01, burst=4))
    secret = await deployed(talk, **CODE)
    body = b"x" * 200_000
    async with open_surfaces(few) as ports:

        async def status(message_id: str) -> int:
            return (await call(ports, body, signed(secret, body, message_id))).status_code

        same = await asyncio.gather(*(status("msg_0") for _ in range(8)))
        assert sorted(same) == [200] * 7 + [202]
        many = await asyncio.gather(*(status(f"msg_{number}") for number in range(1, 11)))
        assert sorted(many) == [202] * 3 + [429] * 7
        assert {await status("msg_0"), await status("msg_99")} == {200, 429}
    assert await bodies(ctx) == len(await talk.query("SELECT 1 FROM source_request")) == 4
    assert await talk.query("SELECT 1 FROM delivery_body") == []


class CutOff(ObjectStoreOf):
    """Its process dies once an object is stored."""

    async def put(self, location: ObjectLocation, content: bytes) -> None:
        await self.store.put(location, content)
        raise ConnectionAbortedError


async def test_a_body_that_a_crash_leaves_is_removed_later(talk: Conversation, ctx: StepContext) -> None:
    secret = await deployed(talk, "bearer", **CODE)
    headers, body = {"authorization": f"Bearer {secret}"}, b"x" * 200_000
    cut_off = replace(ctx, objects=CutOff(ctx.objects))
    with pytest.raises(ConnectionAbortedError):
        await accept_delivery(cut_off, "chain", "src", headers, body)
    await accept_delivery(ctx, "chain", "src", headers, body)
    assert (await bodies(ctx), await collect_bodies(ctx)) == (2, 0)
    await talk.pass_time(3601)
    assert (await collect_bodies(ctx), await collect_bodies(ctx)) == (1, 0)
    [named] = await talk.query("SELECT body_location FROM source_request")
    [left] = await ctx.objects.list(ctx.objects.root)
    assert left.location.uri == named["body_location"]


async def test_a_body_that_was_removed_as_left_over_is_not_named(
    talk: Conversation, ctx: StepContext
) -> None:
    secret = await deployed(talk, "bearer", **CODE)

    class Slow(ObjectStoreOf):
        async def put(self, location: ObjectLocation, content: bytes) -> None:
            await self.store.put(location, content)
            await talk.pass_time(3601)
            assert await collect_bodies(ctx) == 1

    slow = replace(ctx, objects=Slow(ctx.objects))
    with pytest.raises(Unavailable, match="too long"):
        await accept_delivery(slow, "chain", "src", {"authorization": f"Bearer {secret}"}, b"x" * 200_000)
    assert await talk.query("SELECT 1 FROM source_request") == []
    assert await bodies(ctx) == 0


async def test_a_held_webhook_keeps_deliveries_and_delivers_them_in_order(
    talk: Conversation, ports: Surfaces
) -> None:
    secret = await deployed(talk, **CODE)
    await pause_job(talk.ctx, "chain", "src")
    for number in (1, 2, 3):
        body = b"%d" % number
        answer = await call(ports, body, signed(secret, body, f"msg_{number}"))
        assert (answer.status_code, answer.json()["kept"]) == (202, True)
    assert (await call(ports, b"1", signed(secret, b"1", "msg_1"))).status_code == 200
    assert await talk.queued("src") == []
    await resume_job(talk.ctx, "chain", "src")
    await route_waiting(talk.ctx)
    leases = [await talk.lease(task_id) for task_id in await talk.queued("src")]
    bodies = [lease.payload.source.delivery.body for lease in leases]  # type: ignore[union-attr]
    assert bodies == ["1", "2", "3"]


async def test_sources_are_listed_without_their_secrets(talk: Conversation, ports: Surfaces) -> None:
    secret = await deployed(talk)
    await call(ports, b"{}", signed(secret, b"{}"))
    answer = await ports.person.get("/v1/sources")
    [listed] = answer.json()["sources"]
    assert (listed["kind"], listed["signature"], listed["last_number"]) == ("webhook", "standard", 1)
    assert secret not in answer.text
    assert (await ports.user.get("/v1/sources")).status_code == 401
    assert (await ports.user.post("/v1/sources/chain/src/secret")).status_code == 401
