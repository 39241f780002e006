"""Dispatchers that stand still and wake up late: what they believe is out of date, and they do no harm."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID

from tests.support.load import Load
from tests.support.proxies import ClientMessage, Cut, CuttingProxy, pass_all
from tests.support.site import LEASE_SECONDS, Databases, open_single_task, open_site

# The session that changed the row has been idle for longer than between two statements. A process that is stopped
# amid a statement holds its locks for longer: until its transaction is ended.
COMMIT_IS_HELD = """
SELECT EXISTS (
    SELECT FROM task t JOIN pg_stat_activity a ON a.backend_xid = t.xmax
    WHERE t.task_id = $1 AND a.state = 'idle in transaction'
      AND a.state_change < clock_timestamp() - interval '1 second'
)
"""


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
        async with task.beating(awake, claim):
            await databases.until_past(slept_past)
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
        await databases.until(COMMIT_IS_HELD, UUID(task.task_id))
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
