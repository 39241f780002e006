"""A queue is opened from an address, whose scheme chooses the driver."""

from __future__ import annotations

import pytest

from tracelake import queue as queues
from tracelake.domain.errors import Invalid, Unavailable
from tracelake.postgres.sessions import KeptSessions
from tracelake.settings import Secret


@pytest.mark.parametrize("scheme", ["postgresql", "postgres"])
async def test_a_postgres_queue_is_opened_by_its_scheme(scheme: str) -> None:
    with pytest.raises(Unavailable) as refused:
        await queues.open(f"{scheme}://someone:secret@127.0.0.1:1/queue")
    assert refused.value.reason == "QueueUnavailable"


@pytest.mark.parametrize("url", ["sqs://someone:secret@host/queue", "host=secret", ""])
async def test_a_queue_of_an_unknown_scheme_is_refused_with_those_that_there_are(url: str) -> None:
    with pytest.raises(Invalid) as refused:
        await queues.open(url)
    assert refused.value.reason == "UnknownQueueScheme"
    assert "postgresql://" in refused.value.message
    assert "secret" not in refused.value.message


@pytest.mark.parametrize("url", ["sqs://someone:secret@host/queue", "host=secret", ""])
async def test_a_queue_of_an_unknown_scheme_is_neither_installed_nor_looked_after(url: str) -> None:
    with pytest.raises(Invalid, match="postgresql://"):
        await queues.install(url, installation_id="one", password=Secret("secret"))
    with pytest.raises(Invalid, match="postgresql://"):
        await queues.restore_logins(
            url, KeptSessions("test"), installation_id="one", password=Secret("secret")
        )


async def test_installing_a_queue_that_is_away_says_so() -> None:
    with pytest.raises(Unavailable) as refused:
        await queues.install(
            "postgresql://someone:secret@127.0.0.1:1/queue", installation_id="one", password=Secret("x")
        )
    assert refused.value.reason == "QueueUnavailable"
    assert "secret" not in refused.value.message
