"""Dispatchers that stand still and wake up late: what they believe is out of date, and they do no harm."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID

from tracelake.testing.cutting_proxy import ClientMessage, Cut, CuttingProxy, pass_all
from tracelake.testing.load import Load
from tracelake.testing.single_task import LEASE_SECONDS, open_single_task
from tracelake.testing.site import Databases, open_site


async def test_a_replica_that_slept_through_leases_reaps_none_that_were_renewed(
    databases: Databases, tmp_path: Path
) -> None:
    async with (
        open_site(databases, tmp_path) as site,
        Load(site.replicas, databases.queue_dsn, seed=2) as load,
        open_single_task(site.replicas[1]) as task,
    ):
        sleeper, awake = site.replicas
        load.begin()
        claim = await task.claimed(awake)
        await load.made_progress(20)
        sleeper.stop()
        slept_past = datetime.fromisoformat(claim["lease_expires_at"]) + timedelta(seconds=LEASE_SECONDS)
        sleeping = asyncio.create_task(databases.until_past(slept_past))
        while not sleeping.done():
            assert (await task.beat(awake, claim)).status_code == 200
            await asyncio.wait([sleeping], timeout=LEASE_SECONDS / 4)
        sleeper.resume()
        await load.made_progress(20)
        assert (await task.beat(sleeper, claim)).status_code == 200
        assert (await task.complete(sleeper, claim)).status_code == 200
        assert [each["outcome"] for each in (await task.show(awake))["attempts"]] == ["Completed"]
        await load.finish()
        await site.verify(load.ledger)


async def test_a_lone_dispatcher_that_slept_listens_for_a_lease_before_it_reaps(
    databases: Databases, tmp_path: Path
) -> None:
    async with open_site(databases, tmp_path, replicas=1) as site, open_single_task(site.replicas[0]) as task:
        [sleeper] = site.replicas
        claim = await task.claimed(sleeper)
        sleeper.stop()
        await databases.until_past(datetime.fromisoformat(claim["lease_expires_at"]))
        sleeper.resume()
        await databases.until_past(datetime.now(UTC) + timedelta(seconds=LEASE_SECONDS / 2))
        assert (await task.beat(sleeper, claim)).status_code == 200
        shown = await task.becomes(sleeper, "Queued")
        assert [each["outcome"] for each in shown["attempts"]] == ["TimedOut"]


async def test_a_replica_stopped_inside_a_transaction_holds_up_nobody_for_long(
    databases: Databases, tmp_path: Path
) -> None:
    async with (
        CuttingProxy(databases.state_dsn) as proxy,
        open_site(databases, tmp_path, state_dsn=proxy.dsn, replicas=1, prefix="stuck") as stuck_site,
        open_site(databases, tmp_path, replicas=1, prefix="other") as other_site,
        open_single_task(stuck_site.replicas[0]) as task,
    ):
        [stuck], [other] = stuck_site.replicas, other_site.replicas
        proxy.policy = hold_commits
        claiming = asyncio.create_task(task.claim(stuck))
        locked = "SELECT NOT EXISTS (SELECT 1 FROM task WHERE task_id = $1 FOR UPDATE SKIP LOCKED)"
        await databases.until(locked, UUID(task.task_id))
        stuck.stop()
        async with asyncio.timeout(120):
            # On a busy machine the lock may outlast a request; whoever claims asks again.
            while (answer := await task.claim(other, worker="another")).status_code == 503:
                pass
        claim = answer.json()
        assert claim["attempt"] == 1
        assert (await task.complete(other, claim)).status_code == 200
        proxy.policy = pass_all
        proxy.let_go()
        stuck.resume()
        answer = await claiming
        assert answer.status_code == 503 or answer.json()["reason"] == "Completed", answer.text
        await stuck_site.until_ready()
        assert [each["worker_id"] for each in (await task.show(stuck))["attempts"]] == ["another"]


def hold_commits(message: ClientMessage) -> Cut:
    return Cut.HOLD if message.is_commit else Cut.NONE
