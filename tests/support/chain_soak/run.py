"""One soak: start everything, disturb it for a while, let it settle, compare."""

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

from tests.support.anvil import Anvil, running_anvil
from tests.support.chain_soak.compare import Truth, Upto, differences
from tests.support.chain_soak.faults import LEASE_SECONDS, ChainFaults, EndpointFaults, ProcessFaults
from tests.support.chain_soak.stack import DAG, FOLLOWER, SoakStack, Watch, running_stack
from tests.support.faulty_rpc import FaultyRpc
from tracelake.domain.errors import TracelakeError

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
    """``wrong`` is empty if everything that is stored equals the node's chain; ``rows`` is the number of rows
    in the chain's own tables."""

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
            endpoints = EndpointFaults(crooked, seed)
            return _soak(node, endpoints, stack, seconds=seconds, seed=seed, say=say)


def _soak(
    node: Anvil, endpoints: EndpointFaults, stack: SoakStack, *, seconds: float, seed: int, say: Say
) -> Report:
    dice = random.Random(seed)
    chain = ChainFaults(node, seed, FINALITY)
    processes = ProcessFaults(stack, chain, seed, say)
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
    happened |= {"wrong_answers": endpoints.wrong_answers, "looks": watch.looks}
    return Report(head + 1, truth.rows(), happened, watch.wrong + wrong)


def _settled(truth: Truth, stack: SoakStack, say: Say) -> list[str]:
    """Differences that are left after enough time for all work. Two looks in a row must find none, so that a late
    writer can't spoil it."""
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
    """The end of the last whole range of ``size`` blocks up to ``last``."""
    return (last + 1) // size * size - 1


def _followed(stack: SoakStack) -> dict[str, int]:
    """Counters of the follower itself."""
    with stack.client() as client:
        [task] = client.tasks(dag=DAG, job=FOLLOWER).tasks
        known = client.task(task.task_id).state or {}
    return {"attempts_of_the_follower": task.attempt, "reorgs_followed": known.get("reorgs", 0)}


def _dag() -> bytes:
    text = resources.files("tests.support.chain_soak").joinpath("dag.yaml").read_text(encoding="utf-8")
    for name, value in (("FINALITY", FINALITY), ("RANGE", RANGE), ("FRESH", FRESH), ("LEASE", LEASE_SECONDS)):
        text = text.replace(name, str(value))
    return text.encode()
