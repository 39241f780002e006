"""Dispatchers die and stand still; the work goes on through the others."""

from __future__ import annotations

import random
from pathlib import Path

from tests.support.load import Load, audit
from tests.support.site import Databases, open_site


async def test_replicas_killed_under_load_lose_and_repeat_nothing(
    databases: Databases, tmp_path: Path
) -> None:
    dice = random.Random(1)
    async with (
        open_site(databases, tmp_path) as site,
        Load(site.replicas, databases.queue_dsn, seed=1) as load,
    ):
        load.begin()
        for _ in range(4):
            await load.made_progress(dice.randint(5, 25))
            victim = dice.choice(site.replicas)
            await victim.kill()
            await load.made_progress(5)
            await victim.start()
        await load.finish()
        await site.verify(load.ledger)
        assert load.ledger.repeats, "no fault ever reached a caller"
        load.ledger.scopes.append((10**6, 10**6))
        assert await audit(databases.state_dsn, load.ledger), "the audit must miss what was never done"
