"""What a seed turns on. Each run has its own mixture of faults: a storm of everything hides what one would show."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tracelake.testing.simulation.graph import JOBS, Layout, closure
from tracelake.testing.simulation.scheduler import Odds


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
    return Profile(
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
