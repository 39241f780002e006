"""``tracelake devchain``: serves a deterministic chain for development, as a node would."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tracelake.cli.failures import require_extras
from tracelake.domain.duration import parse_duration
from tracelake.domain.errors import Invalid
from tracelake.evm.devchain.profile import MOST_AT_ONCE, MOST_BLOCKS, MOST_TRANSACTIONS

if TYPE_CHECKING:
    from tracelake.evm.devchain.chain import DevChain

HELP = """Serve a deterministic EVM chain over JSON-RPC, in the foreground, until Ctrl-C.

Blocks have valid hashes, roots and blooms; they hold ERC-20 and ERC-721 traffic, every type of transaction,
failures, empty blocks and amounts up to 2^256 − 1. The same options give the same chain, block for block, on every
machine. State roots and base fees are made up: nothing can be sent to the chain or called on it. `--fork` sets the
rules of a fork of Ethereum, and `--fork NAME@BLOCK` lets one begin while the chain grows.

The chain is made before it is served, which takes a second for about 1,500 blocks of the usual size. It is kept
in memory: a chain may have 1,000,000 blocks and 4,000,000 transactions at the start, and grow by as many.

With `--block-time` it grows while it runs, and with `--reorg-every` it replaces its last blocks now and then.
Programs on this machine can do both as well: `devchain_mine [count]`, `devchain_reorg [depth, new_length]`,
`devchain_rollback [depth]` and `devchain_finalize [height]`, with up to 10,000 blocks a call.

Examples:

    tracelake devchain

    tracelake devchain --port 0 --blocks 20000 --block-time 0

    tracelake devchain --seed 7 --block-time 500ms --reorg-every 20 --reorg-depth 3

    tracelake devchain --fork osaka --fork amsterdam@500

    curl -s localhost:8545 -d '{"jsonrpc":"2.0","id":1,"method":"devchain_reorg","params":[5]}'
"""

LONGEST_BLOCK_TIME = 86_400.0
SHORTEST_BLOCK_TIME = 0.001


def devchain(
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free one.")] = 8545,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    blocks: Annotated[
        int, typer.Option(min=0, max=MOST_BLOCKS, help="The head's number at the start.")
    ] = 1000,
    block_time: Annotated[
        str,
        typer.Option(help="Time between blocks, from 1ms to 1440m, as in 1s or 500ms; 0 for no new blocks."),
    ] = "1s",
    seed: Annotated[int, typer.Option(min=-(2**63), max=2**63 - 1, help="Another seed, another chain.")] = 0,
    chain_id: Annotated[int, typer.Option(min=1, max=2**53, help="The result of eth_chainId.")] = 31339,
    transactions: Annotated[
        int, typer.Option(min=0, max=2000, help="Transactions per block, on average.")
    ] = 4,
    logs: Annotated[int, typer.Option(min=0, max=2000, help="Logs per transaction, on average.")] = 2,
    steady: Annotated[
        bool, typer.Option("--steady", help="Exactly these numbers in every block, and no empty blocks.")
    ] = False,
    finality: Annotated[
        int,
        typer.Option(
            min=-1, max=MOST_BLOCKS, help="Blocks until one is final; -1 for a chain without finality."
        ),
    ] = 64,
    reorg_every: Annotated[
        int, typer.Option(min=0, max=MOST_BLOCKS, help="Number of blocks between reorgs; 0 for no reorgs.")
    ] = 0,
    reorg_depth: Annotated[
        int, typer.Option(min=1, max=MOST_AT_ONCE, help="Number of blocks that a reorg replaces.")
    ] = 2,
    fork: Annotated[
        list[str] | None,
        typer.Option(
            help="A fork of Ethereum, as NAME or NAME@BLOCK; again for a later one. osaka by default."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the address as JSON.")] = False,
) -> None:
    require_extras("coincurve", "tiny_keccak", "httptools")
    from tracelake.evm.devchain.chain import DevChain
    from tracelake.evm.devchain.server import Autopilot, serve_until_signal

    interval = _seconds(block_time)
    if reorg_every and not interval:
        raise Invalid("InvalidOption", "--reorg-every needs a --block-time: nothing is mined without")
    if blocks * transactions > MOST_TRANSACTIONS:
        raise Invalid(
            "InvalidOption",
            f"--blocks {blocks} with --transactions {transactions} makes {blocks * transactions:,} transactions, "
            f"the most is {MOST_TRANSACTIONS:,}: take fewer of either",
        )
    chain = DevChain(
        seed,
        chain_id=chain_id,
        transactions_per_block=transactions,
        logs_per_transaction=logs,
        steady=steady,
        blocks=blocks,
        finality=None if finality < 0 else finality,
        forks=fork or ("osaka",),
    )
    autopilot = Autopilot(interval, reorg_every, reorg_depth) if interval else None
    serve_until_signal(chain, autopilot, host, port, lambda url: _ready(url, chain, as_json), _progress)


devchain.__doc__ = HELP


def _ready(url: str, chain: DevChain, as_json: bool) -> None:
    from tracelake.cli.show import print_json

    head = chain.block(chain.head)
    assert head is not None
    if as_json:
        print_json({"url": url, "chain_id": chain.chain_id, "head": head.number, "hash": head.hash})
    else:
        typer.echo(f"ready {url} chain id {chain.chain_id}, head {head.number} {head.hash}")


def _progress(made: int, of: int) -> None:
    typer.echo(f"tracelake devchain: made {made:,} of {of:,} blocks", err=True)


def _seconds(text: str) -> float:
    seconds = parse_duration(text, units=("ms", "s", "m"), bare=True, fractions=True)
    if seconds is None:
        raise Invalid("InvalidOption", f"--block-time {text}: a time like 1s, 500ms or 0 is wanted")
    if seconds and not SHORTEST_BLOCK_TIME <= seconds <= LONGEST_BLOCK_TIME:
        raise Invalid("InvalidOption", f"--block-time {text}: from 1ms to 1440m, or 0 for never")
    return seconds
