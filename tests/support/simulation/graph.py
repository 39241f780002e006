"""The DAG that a run deploys with the expected contents of its datasets, and the faults that a seed turns on.

``head`` follows the chain; ``derive`` and ``derive2`` follow it row by row; ``log`` appends; ``ranges`` turns
its cursor into ranges, which ``compact`` and ``side`` pack into files that ``rollup``, ``join`` and ``tail``
read. ``ask`` is triggered by hand and split into chunks that ``ingest`` and ``sum`` process, in any order;
``gather`` reads them up to the first gap. A run has some of these jobs, with everything that they depend on. A
deploy changes ``tag`` in a job's config.

Each run has its own mixture of faults: all faults together would hide the effect of one.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tests.support.simulation.scheduler import Odds

DAG = "sim"
RANGE = 4
CHUNK = 5
LEASE = 30
FIXED = frozenset({"ask"})
"""Jobs that no deploy changes: what was asked for by hand belongs to a version and is not asked again."""


@dataclass(frozen=True, slots=True)
class SimJob:
    operator: str
    storage: str
    inputs: tuple[tuple[str, bool], ...] = ()
    strategy: str | None = None
    append: bool = False
    cappable: bool = False
    source: str | None = None


JOBS: Mapping[str, SimJob] = {
    "head": SimJob("follow", "postgres", source="always_on"),
    "derive": SimJob("map", "postgres", (("head", True),), "PerUpdate"),
    "derive2": SimJob("map", "postgres", (("derive", True),), "PerUpdate"),
    "log": SimJob("append", "postgres", (("head", True),), "PerUpdate", append=True),
    "ranges": SimJob("aggregate", "none", (("head", True),), "PerUpdate"),
    "compact": SimJob("pack", "parquet", (("ranges", True), ("head", False)), "PerPartition", cappable=True),
    "side": SimJob("pack", "parquet", (("ranges", True), ("head", True)), "PerPartition"),
    "rollup": SimJob("pack", "parquet", (("compact", True),), "PerPartition", cappable=True),
    "join": SimJob("pack", "parquet", (("compact", True), ("side", True)), "PerPartition"),
    "tail": SimJob("map", "postgres", (("rollup", True),), "PerUpdate"),
    "ask": SimJob("ask", "none", source="manual"),
    "split": SimJob("split", "none", (("ask", True),), "PerPartition"),
    "ingest": SimJob("ingest", "parquet", (("split", True),), "PerPartition", cappable=True),
    "sum": SimJob("pack", "parquet", (("ingest", True),), "PerPartition"),
    "gather": SimJob("map", "postgres", (("ingest", True),), "PerUpdate"),
}


@dataclass(frozen=True, slots=True)
class Layout:
    """The jobs of a run, how many of each may run at once and wait before their producers are held, which of them
    are bulk, how many tasks of an operator may run at once, and the tags that are deployed."""

    jobs: frozenset[str]
    caps: Mapping[str, int]
    tags: Mapping[str, str]
    depths: Mapping[str, int] = field(default_factory=dict)
    bulk: frozenset[str] = frozenset()
    operators: Mapping[str, int] = field(default_factory=dict)

    def with_tag(self, job: str, tag: str) -> Layout:
        return replace(self, tags={**self.tags, job: tag})

    def yaml(self) -> str:
        """JSON is YAML; the order of the jobs is that of ``JOBS``."""
        defaults = {
            "max_attempts": 3,
            "timeout_seconds": 600,
            "heartbeat_timeout_seconds": LEASE,
            "retry": {"base": 2, "max": 10},
        }
        jobs = [self._job(name, job) for name, job in JOBS.items() if name in self.jobs]
        return json.dumps({"name": DAG, "defaults": defaults, "jobs": jobs}, indent=1)

    def _job(self, name: str, job: SimJob) -> dict[str, Any]:
        spec: dict[str, Any] = {
            "name": name,
            "activation": "source" if job.source else "reactive",
            "runtime": "ecs_python",
            # A manual source that named code would get a task for each trigger, and send its events itself.
            **({} if job.source == "manual" else {"operator": job.operator}),
            "outputs": [{"name": "rows", "storage": job.storage}],
            "config": {"tag": self.tags[name]},
        }
        if job.source == "manual":
            # Without code it has no config, and another generation when its output has another name.
            del spec["config"]
            spec["outputs"] = [{"name": f"rows_{self.tags[name]}", "storage": job.storage}]
        if job.source:
            return {**spec, "source": {"kind": job.source}}
        spec["inputs"] = [
            {"from": {"job": source, "output": 0}, "trigger": trigger} for source, trigger in job.inputs
        ]
        spec["execution_strategy"] = job.strategy
        if job.append:
            spec |= {"update_strategy": "append", "unique_key": ["row"]}
        if name in self.caps:
            spec["scaling"] = {"max_concurrency": self.caps[name]}
        if name in self.depths:
            spec["max_queue_depth"] = self.depths[name]
        if name in self.bulk:
            spec["priority"] = "bulk"
        return spec

    def lineage(self, job: str) -> str:
        """What a job's data depends on: the same lineage deployed again is the same dataset version."""
        above = ",".join(self.lineage(source) for source, _ in JOBS[job].inputs)
        return f"{job}={self.tags[job]}[{above}]"

    def expected(self, job: str, block: int, chain: Callable[[int], str | None]) -> str:
        """What this job's row for a block must be, given the chain."""
        if job == "head":
            return str(chain(block))
        if job == "ingest":
            return f"{self.tags[job]}(m{block})"
        data = [source for source, _ in JOBS[job].inputs if JOBS[source].storage != "none"]
        return f"{self.tags[job]}({','.join(self.expected(source, block, chain) for source in data)})"


def closure(wanted: frozenset[str]) -> frozenset[str]:
    """The jobs wanted, and all that they read."""
    found = set(wanted)
    while True:
        more = {source for job in found for source, _ in JOBS[job].inputs} - found
        if not more:
            return frozenset(found)
        found |= more


@dataclass(frozen=True, slots=True)
class Profile:
    """``sweeps`` is off where no message may get lost: then every wake-up must come by itself. ``reconciles``
    is off where nothing is deployed or paused: then routing must miss nothing by itself."""

    layout: Layout
    odds: Odds
    turns: int = 900
    workers: int = 3
    dispatchers: int = 2
    lost_reply: float = 0.0
    duplicate: float = 0.0
    queue_loss: bool = False
    deploys: bool = False
    pauses: bool = False
    cancels: bool = False
    reorganizes: bool = False
    crash: float = 0.0
    zombie: float = 0.0
    fails: float = 0.0
    releases: float = 0.0
    impostor: float = 0.0
    batches: bool = False
    chain_pace: float = 25.0
    chain_moves: int = 1000
    people: int = 2

    @property
    def sweeps(self) -> bool:
        return self.queue_loss

    @property
    def balances(self) -> bool:
        """Whether anything is ever held or paused, and has to be let go again."""
        return bool(self.layout.depths) or self.pauses

    @property
    def reconciles(self) -> bool:
        return self.deploys or self.pauses


def draw(rng: random.Random) -> Profile:
    ends = [name for name in JOBS if name not in ("head", "ask", "split", "ranges")]
    jobs = closure(frozenset(rng.sample(ends, rng.randint(1, 4))))
    caps = {name: rng.randint(1, 2) for name in JOBS if JOBS[name].cappable and rng.random() < 0.7}
    layout = Layout(jobs, {k: v for k, v in caps.items() if k in jobs}, dict.fromkeys(JOBS, "a"))

    def sometimes(probability: float, highest: float) -> float:
        return rng.uniform(0, highest) if rng.random() < probability else 0.0

    die = sometimes(0.6, 0.02)
    odds = Odds(
        die,
        die * 4,
        rng.choice((0.0, 0.5, 0.8)),
        rng.uniform(0.02, 0.15),
        rng.choice((2.0, 8.0, 40.0)),
        rng.choice((0.0, 0.01, 0.03)),
    )
    profile = Profile(
        layout,
        odds,
        turns=rng.randint(500, 1100),
        workers=rng.randint(2, 4),
        lost_reply=sometimes(0.6, 0.15),
        duplicate=sometimes(0.6, 0.15),
        queue_loss=rng.random() < 0.4,
        deploys=rng.random() < 0.35,
        pauses=rng.random() < 0.2,
        cancels=rng.random() < 0.4,
        reorganizes=rng.random() < 0.75,
        crash=sometimes(0.5, 0.15),
        zombie=sometimes(0.6, 0.25),
        fails=sometimes(0.5, 0.25),
        releases=sometimes(0.5, 0.25),
        impostor=sometimes(0.4, 0.1),
        batches=rng.random() < 0.5,
        chain_pace=rng.choice((8.0, 25.0)),
        chain_moves=rng.choice((3, 1000)),
    )
    # Drawn last: what a seed did before there was pressure, it still does.
    if rng.random() < 0.5:
        full = {name: rng.randint(1, 3) for name in sorted(jobs) if JOBS[name].inputs and rng.random() < 0.6}
        bulk = frozenset(name for name in sorted(jobs) if JOBS[name].inputs and rng.random() < 0.3)
        layout = replace(layout, depths=full, bulk=bulk)
    # Of dice of their own, so that seeds without them do what they did before there were such caps.
    dice = random.Random(str(rng.getstate()))
    if dice.random() < 0.3:
        layout = replace(layout, operators={"pack": dice.randint(1, 2), "ingest": dice.randint(1, 2)})
    return replace(profile, layout=layout)
