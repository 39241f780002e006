"""Deploys on both replicas at once, over and over, while work runs: it is neither lost nor done again."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.support.load import DAG, Load
from tests.support.site import Databases, open_site

CHURN = """
name: churn
jobs:
  - {{ name: src, activation: source, runtime: dispatcher, source: {{ kind: manual }}, outputs: 1 }}
  - name: work
    activation: reactive
    runtime: ecs_python
    operator: noop
    config: {{ turn: {turn} }}
    inputs: [{{ from: {{ job: src, output: 0 }} }}]
    outputs: 1
    execution_strategy: PerPartition
    heartbeat_timeout_seconds: 2
    retry: {{ base: 0, max: 1 }}
"""


async def test_deploys_under_load_lose_and_repeat_nothing(databases: Databases, tmp_path: Path) -> None:
    async with (
        open_site(databases, tmp_path) as site,
        Load(site.replicas, databases.queue_dsn, seed=10) as load,
    ):
        load.begin()
        for turn in range(12):
            retuned = DAG.replace("max_concurrency: 3", f"max_concurrency: {2 + turn % 3}")
            answers = await asyncio.gather(
                load.caller.say("user", "/v1/dags", content=retuned),
                load.caller.say("user", "/v1/dags", content=CHURN.format(turn=turn)),
                load.caller.say("user", "/v1/dags", content=CHURN.format(turn=turn)),
                load.caller.say("user", "/v1/dags", content=CHURN.format(turn=turn + 1)),
            )
            assert {answer.status_code for answer in answers} <= {200, 201}
            assert len({answer.json()["dag_version"] for answer in answers[1:3]}) == 1
            scope = {"start": turn * 10, "end": turn * 10 + 9}
            answer = await load.caller.say("user", "/v1/sources/churn/src/trigger", json=scope)
            assert answer.status_code == 202, answer.text
            await load.made_progress(5)
        await load.finish()
        await site.verify(load.ledger)
        await databases.until(
            "SELECT count(*) = 1 FROM job WHERE dag_name = 'churn' AND name = 'work' AND active"
        )
        await databases.until(
            "SELECT count(*) = max(version) FROM dag_version WHERE dag_name = 'churn' GROUP BY dag_name"
        )
