"""One soak: bring everything up, treat it badly for a while, let it settle, compare."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import psycopg

from tracelake.domain.errors import TracelakeError
from tracelake.testing.anvil import Anvil, running_anvil
from tracelake.testing.chain_soak.chain_weather import ChainWeather
from tracelake.testing.chain_soak.compare import Truth, Upto, differences
from tracelake.testing.chain_soak.endpoint_weather import EndpointWeather
from tracelake.testing.chain_soak.process_weather import LEASE_SECONDS, ProcessWeather
from tracelake.testing.chain_soak.stack import DAG, FOLLOWER, SoakStack, running_stack
from tracelake.testing.chain_soak.watch import Watch
from tracelake.testing.faulty_rpc import FaultyRpc

FINALITY = 12
RANGE = 20
FRESH = 4
_BETWEEN_BLOCKS = (0.1, 0.6)
_SETTLE_SECONDS = 240.0
_LOOK_SECONDS = 1.0
_RIGHT_TIMES = 2
_POOL = """
[pools.main]
deadline_seconds = 10

[[pools.main.endpoints]]
name = "direct"
url = "{direct}"

[[pools.main.endpoints]]
name = "crooked"
url = "{crooked}"
timeout_seconds = 2
"""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Report:
    """``wrong`` is empty when everything that is stored equals what the node says; ``rows`` is how many of them
    the chain's own tables have."""

    blocks: int
    rows: int
    happened: dict[str, int]
    wrong: list[str]


def run(folder: Path, *, seconds: float, seed: int, say: Say) -> Report:
    with running_anvil() as node, FaultyRpc(node.url) as crooked:
        pools = folder / "rpc.toml"
        pools.touch(0o600)
        pools.write_text(_POOL.format(direct=node.url, crooked=crooked.url))
        with running_stack(folder, pools) as stack:
            endpoints = EndpointWeather(crooked, seed)
            return _soak(node, endpoints, stack, seconds=seconds, seed=seed, say=say)


def _soak(
    node: Anvil, endpoints: EndpointWeather, stack: SoakStack, *, seconds: float, seed: int, say: Say
) -> Report:
    dice = random.Random(seed)
    chain = ChainWeather(node, seed, FINALITY)
    processes = ProcessWeather(stack, chain, seed, say)
    with stack.client() as client:
        client.deploy(_dag())
        watch = Watch(stack, client)
    with ThreadPoolExecutor(1) as thread:
        mishaps = thread.submit(processes.run, seconds)
        try:
            while not mishaps.done():
                chain.next()
                endpoints.next()
                watch.look()
                time.sleep(dice.uniform(*_BETWEEN_BLOCKS))
        finally:
            processes.give_up()
        mishaps.result()
    endpoints.settle()
    stack.keep_second_worker()
    head = chain.settle(FINALITY + RANGE)
    say(f"block {head}: left alone")
    truth = Truth.of(node)
    wrong = _settled(truth, stack, say)
    happened = {**chain.seen, **processes.seen, **_followed(stack)}
    happened |= {"wrong_answers": endpoints.told, "looks": watch.looks}
    return Report(head + 1, truth.rows(), happened, watch.wrong + wrong)


def _settled(truth: Truth, stack: SoakStack, say: Say) -> list[str]:
    """What is still wrong after a time in which everything could have been done. Right is what is right twice:
    nobody who comes late may change it."""
    upto = Upto(final=_whole(truth.head - FINALITY, RANGE), fresh=_whole(truth.head, FRESH))
    began = time.monotonic()
    wrong, right = ["the stack didn't answer"], 0
    while time.monotonic() - began < _SETTLE_SECONDS and right < _RIGHT_TIMES:
        with suppress(TracelakeError, psycopg.OperationalError), stack.client() as client:
            wrong = list(differences(truth, client, stack.data_dsn, upto))
            right = 0 if wrong else right + 1
        time.sleep(_LOOK_SECONDS)
    say(f"looked for {time.monotonic() - began:.1f} s")
    return wrong


def _whole(last: int, size: int) -> int:
    """The end of the last range of ``size`` blocks that ends by then."""
    return (last + 1) // size * size - 1


def _followed(stack: SoakStack) -> dict[str, int]:
    """What the follower itself has seen."""
    with stack.client() as client:
        [task] = client.tasks(dag=DAG, job=FOLLOWER).tasks
        known = client.task(task.task_id).state or {}
    return {"attempts_of_the_follower": task.attempt, "reorgs_followed": known.get("reorgs", 0)}


def _dag() -> bytes:
    text = resources.files("tracelake.testing.chain_soak").joinpath("dag.yaml").read_text(encoding="utf-8")
    for name, value in (("FINALITY", FINALITY), ("RANGE", RANGE), ("FRESH", FRESH), ("LEASE", LEASE_SECONDS)):
        text = text.replace(name, str(value))
    return text.encode()
