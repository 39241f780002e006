"""Test your own operators and DAGs: in process, without a stack.

    from tracelake.testing import check_dag, devchain, run_operator

    run = run_operator(my_operator, blocks=range(10, 13), inputs={"logs": table}, config={"offset": 1})
    assert run.outputs["result"].num_rows == 3

    assert check_dag(Path("dag.yaml").read_text()) == []

    with devchain(blocks=50) as node:               # an EVM chain as a JSON-RPC endpoint on a free port
        run_operator(my_source, rpc_pool=node.url, stop_after_events=1)

This package is public: its names and arguments change with a note in the changelog only. It imports nothing that a
test runner has to bring, and needs ``tracelake[worker]``, or ``tracelake[dispatcher]`` for ``check_dag`` alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from tracelake.testing.operator_run import OperatorRun, run_operator

if TYPE_CHECKING:
    from tracelake.domain.errors import DagProblem
    from tracelake.evm.devchain.server import RunningChain

__all__ = ["OperatorRun", "check_dag", "devchain", "run_operator"]


def check_dag(
    text: str | bytes,
    *,
    runtimes: Iterable[str] = (),
    bundles: Iterable[Path] = (),
    folder: Path | None = None,
) -> list[DagProblem]:
    """Everything that a deploy would refuse in a DAG file, each with its line, column and field; empty if nothing.

    ``runtimes`` are names beside the built-in ones that the installation registers, ``bundles`` the zip files of
    functions that the file refers to, ``folder`` the place of files that it names. Names that other DAGs publish
    aren't known here."""
    from tracelake.client.dag_files import ResolvedDag, resolve_files
    from tracelake.domain.bundles import check_zip
    from tracelake.domain.dag.checks import Installation
    from tracelake.domain.dag.parse import parse_dag
    from tracelake.domain.errors import InvalidDag
    from tracelake.domain.runtimes import BUILT_IN, RuntimeTraits

    # As in the Dispatcher's registry, a further runtime can't redefine a built-in one.
    known = {**dict.fromkeys(runtimes, RuntimeTraits()), **BUILT_IN}
    pushed = {
        f"sha256:{sha256(content).hexdigest()}": check_zip(BytesIO(content))
        for content in (path.read_bytes() for path in bundles)
    }
    dag = ResolvedDag(text.encode() if isinstance(text, str) else text)
    try:
        if folder is not None:
            dag = resolve_files(dag.yaml, folder)
        parse_dag(dag.yaml, Installation(known, bundles=pushed))
    except InvalidDag as refused:
        return [dag.in_file(each) for each in refused.problems]
    return []


@contextmanager
def devchain(
    *, blocks: int = 100, seed: int = 0, transactions_per_block: int = 4, finality: int | None = 64
) -> Iterator[RunningChain]:
    """Serve a dev chain as JSON-RPC on a free loopback port: ``node.url``.

    The same seed gives the same chain. ``node.chain.mine(3)`` adds blocks and ``node.chain.reorg(2)`` replaces the
    last ones; ``finality`` is the number of blocks until one is final, ``None`` for a chain without finality."""
    from tracelake.evm.devchain.chain import DevChain
    from tracelake.evm.devchain.server import running

    chain = DevChain(seed, blocks=blocks, transactions_per_block=transactions_per_block, finality=finality)
    with running(chain) as node:
        yield node
