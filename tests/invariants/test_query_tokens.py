"""A capability token opens the Query Service for its own attempt, its own datasets, while the attempt is current.

Everything else that can be made of one is refused before a slot is taken, and nobody can use made-up tokens to
make the service hammer the Dispatcher.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from base64 import urlsafe_b64decode
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import pytest
import pytest_asyncio
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from tests.support.conversation import dag, lease_of, reactive, source
from tests.support.databases import build_state_template
from tests.support.postgres import SharedPostgres
from tests.support.query_port import QueryPort, open_query_port, open_steps, transfers
from tracelake.contracts.dispatcher_api import ClaimResponse
from tracelake.contracts.token_claims import TokenClaims
from tracelake.tokens.jose import base64url
from tracelake.tokens.signing import PemKeyring

pytestmark = pytest.mark.asyncio(loop_scope="module")

COUNT = "SELECT count(*) FROM input_1"


def reader(name: str, made_by: str) -> dict[str, Any]:
    return reactive(name, "clock", {"from": {"job": made_by, "output": 0}, "trigger": False})


DAG = dag(
    source(),
    source("clock"),
    reactive("work", "src", storage="parquet"),
    reactive("other", "src", storage="parquet"),
    reader("reads_work", "work"),
    reader("reads_other", "other"),
    publish={"mine": {"from": {"job": "work"}}, "theirs": {"from": {"job": "other"}}},
)


@dataclass
class Scene:
    port: QueryPort
    keyring: PemKeyring
    start: int = 1000

    async def claims_of_both(self) -> tuple[ClaimResponse, ClaimResponse]:
        """A running attempt of each of the two jobs."""
        before = {job: set(await self.port.talk.tasks(job)) for job in ("reads_work", "reads_other")}
        self.start += 10
        await self.port.talk.trigger(self.start, self.start + 9, job="clock")
        claims = []
        for job, known in before.items():
            [task_id] = set(await self.port.talk.tasks(job)) - known
            claims.append(await self.port.talk.claim(task_id))
        return claims[0], claims[1]

    async def refusal(self, token: str, sql: str = COUNT) -> tuple[int, str]:
        answer = await self.port.ask_as(token, sql)
        return answer.status_code, answer.json()["reason"]


@pytest.fixture(scope="module")
def dsn(postgres_cluster: SharedPostgres) -> Iterator[str]:
    dsn = postgres_cluster.clone("state", build_state_template)
    yield dsn
    postgres_cluster.drop(dsn)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene(dsn: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scene]:
    folder = tmp_path_factory.mktemp("tokens")
    async with open_steps(dsn, folder) as ctx, open_query_port(ctx, dsn) as port:
        await port.talk.deploy(DAG)
        await port.talk.trigger(0, 9)
        for job in ("work", "other"):
            await port.commit(await port.talk.lease(job), transfers(range(10)), 0, 9)
        assert isinstance(ctx.signer, PemKeyring)
        yield Scene(port, ctx.signer)


def token_of(claim: ClaimResponse) -> str:
    assert claim.capability_token is not None
    return claim.capability_token


def claims_in(token: str) -> TokenClaims:
    payload = token.split(".")[1]
    return msgspec.json.decode(_decoded(payload), type=TokenClaims)


def _decoded(segment: str) -> bytes:
    return urlsafe_b64decode(segment + "=" * (-len(segment) % 4))


def altered(claims: TokenClaims, **changes: Any) -> TokenClaims:
    return msgspec.structs.replace(claims, **changes)


async def test_the_token_of_a_running_attempt_opens_its_datasets(scene: Scene) -> None:
    mine, _ = await scene.claims_of_both()
    answer = await scene.port.ask_as(token_of(mine), COUNT)
    assert (answer.status_code, answer.json()["rows"]) == (200, [[10]]), answer.text


async def test_times_parties_and_keys_that_are_not_right(scene: Scene, tmp_path: Path) -> None:
    mine, _ = await scene.claims_of_both()
    good = claims_in(token_of(mine))
    now = int(datetime.now(UTC).timestamp())
    hour = 3600
    wrong = {
        "TokenExpired": altered(good, iat=now - 2 * hour, exp=now - hour),
        "TokenNotYetValid": altered(good, iat=now + hour, exp=now + 2 * hour),
        "TokenWrongAudience": altered(good, aud="tracelake-users"),
        "TokenWrongIssuer": altered(good, iss="somebody"),
        "TokenInvalid": altered(good, exp=good.iat + 100 * 24 * hour),
    }
    for reason, claims in wrong.items():
        assert await scene.refusal(await scene.keyring.sign(claims)) == (401, reason)
    not_before = altered(good, nbf=now + hour)
    assert await scene.refusal(await scene.keyring.sign(not_before)) == (401, "TokenNotYetValid")
    skewed = altered(good, iat=now + 20, exp=now + hour)
    assert (await scene.port.ask_as(await scene.keyring.sign(skewed), COUNT)).status_code == 200
    stranger = await PemKeyring(tmp_path / "keys").sign(good)
    assert await scene.refusal(stranger) == (401, "TokenUnknownKey")
    header = token_of(mine).split(".")[0]
    under_our_name = ".".join((header, *stranger.split(".")[1:]))
    assert await scene.refusal(under_our_name) == (401, "TokenBadSignature")


async def test_algorithms_that_prove_nothing(scene: Scene) -> None:
    mine, _ = await scene.claims_of_both()
    header, payload, signature = token_of(mine).split(".")
    kid = msgspec.json.decode(_decoded(header))["kid"]
    for alg in ("none", "None", "NONE"):
        unsigned = base64url(f'{{"alg":"{alg}","kid":"{kid}","typ":"JWT"}}'.encode()).decode()
        for proof in ("", signature):
            assert await scene.refusal(f"{unsigned}.{payload}.{proof}") == (401, "TokenInvalid")
    key = scene.keyring.public_keys(datetime.now(UTC))[kid]
    for secret in (
        key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo),
        key.public_bytes(Encoding.X962, PublicFormat.UncompressedPoint),
    ):
        for alg in ("HS256", "ES256"):
            named = base64url(f'{{"alg":"{alg}","kid":"{kid}","typ":"JWT"}}'.encode()).decode()
            proof = base64url(hmac.digest(secret, f"{named}.{payload}".encode(), hashlib.sha256)).decode()
            status, reason = await scene.refusal(f"{named}.{payload}.{proof}")
            assert (status, reason) == (401, "TokenInvalid")


async def test_tokens_that_are_cut_stretched_or_changed(scene: Scene) -> None:
    mine, _ = await scene.claims_of_both()
    token = token_of(mine)
    header, payload, signature = token.split(".")
    spoilt = [
        token[:-1],
        token[: len(token) // 2],
        f"{header}.{payload}",
        f"{header}.{payload}.",
        f"{header}.{payload}.{signature}.{signature}",
        f"{header}.{payload}A.{signature}",
        f"{token}=",
        "x",
        "..",
    ]
    for each in spoilt:
        status, reason = await scene.refusal(each)
        assert status == 401, each
        assert reason in ("TokenInvalid", "TokenBadSignature")
    more = msgspec.json.encode(altered(claims_in(token), attempt=2))
    assert await scene.refusal(f"{header}.{base64url(more).decode()}.{signature}") == (
        401,
        "TokenBadSignature",
    )
    assert await scene.refusal(token + "A" * 20_000) == (401, "TokenTooLong")
    assert await scene.refusal(token + "A" * 1_000_000) == (431, "HeadTooLarge")
    assert (await scene.port.ask_as(token, COUNT)).status_code == 200


async def test_another_tasks_token_opens_its_own_datasets_only(scene: Scene) -> None:
    mine, theirs = await scene.claims_of_both()
    assert (await scene.port.ask_as(token_of(mine), "SELECT count(*) FROM mine")).status_code == 200
    assert (await scene.port.ask_as(token_of(theirs), "SELECT count(*) FROM theirs")).status_code == 200
    assert await scene.refusal(token_of(mine), "SELECT * FROM theirs") == (422, "InvalidQuery")
    assert await scene.refusal(token_of(theirs), "SELECT * FROM mine") == (422, "InvalidQuery")
    nobodys = altered(claims_in(token_of(mine)), task_id=uuid4())
    assert await scene.refusal(await scene.keyring.sign(nobodys)) == (409, "StaleAttempt")
    elsewhere = altered(claims_in(token_of(mine)), org_id=uuid4())
    assert (await scene.port.ask_as(await scene.keyring.sign(elsewhere), COUNT)).status_code == 409


async def test_the_attempt_must_be_the_current_one(scene: Scene) -> None:
    mine, theirs = await scene.claims_of_both()
    lease = lease_of(mine)
    await scene.port.talk.fail(lease)
    status, _ = await scene.refusal(token_of(mine))
    assert status == 409
    assert (await scene.port.surfaces.person.post(f"/v1/tasks/{mine.task_id}/retry")).status_code == 200
    again = await scene.port.talk.claim(mine.task_id)
    assert again.attempt == 2
    assert await scene.refusal(token_of(mine)) == (409, "StaleAttempt")
    assert await scene.refusal(token_of(mine), "SELECT 1") == (409, "StaleAttempt")
    assert (await scene.port.ask_as(token_of(again), COUNT)).status_code == 200
    ahead = altered(claims_in(token_of(again)), attempt=3)
    assert await scene.refusal(await scene.keyring.sign(ahead)) == (409, "StaleAttempt")
    await scene.port.talk.complete_scope(lease_of(theirs))
    status, _ = await scene.refusal(token_of(theirs))
    assert status == 409
    canceled, _ = await scene.claims_of_both()
    await scene.port.talk.cancel(canceled.task_id)
    assert await scene.refusal(token_of(canceled)) == (409, "Canceled")


async def test_made_up_key_names_do_not_hammer_the_dispatcher(scene: Scene, tmp_path: Path) -> None:
    mine, _ = await scene.claims_of_both()
    assert (await scene.port.ask_as(token_of(mine), COUNT)).status_code == 200
    before = len(scene.port.key_fetches)
    strangers = [await PemKeyring(tmp_path / str(n)).sign(claims_in(token_of(mine))) for n in range(3)]
    refused = await asyncio.gather(*(scene.refusal(token) for token in strangers * 10))
    assert set(refused) == {(401, "TokenUnknownKey")}
    assert len(scene.port.key_fetches) - before <= 1


async def test_a_key_that_was_rotated_in_is_found_without_a_restart(scene: Scene) -> None:
    """By the first token that names it, as soon as another look is allowed."""
    mine, _ = await scene.claims_of_both()
    assert (await scene.port.ask_as(token_of(mine), COUNT)).status_code == 200
    before = len(scene.port.key_fetches)
    kid = scene.keyring.rotate(datetime.now(UTC) - timedelta(hours=2), overlap_seconds=1)
    renewed = await scene.keyring.sign(claims_in(token_of(mine)))
    assert msgspec.json.decode(_decoded(renewed.split(".")[0]))["kid"] == kid
    async with asyncio.timeout(20):
        while (answer := await scene.port.ask_as(renewed, COUNT)).status_code != 200:
            assert answer.json()["reason"] == "TokenUnknownKey"
            await asyncio.sleep(0.1)
    assert len(scene.port.key_fetches) - before == 1
