"""The alert example on a live node: anvil mines transfers of a token, and ``tracelake dev`` raises the alerts."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg
from psycopg import sql

from tests.support.anvil import CHAIN_ID, Anvil, running_anvil
from tests.support.dev_stack import DevStack
from tests.support.evm_contracts import COIN, Movement, deployment, movements
from tracelake.cli.bundles import zip_folder
from tracelake.client import Client

EXAMPLE = Path(__file__).parents[2] / "examples" / "alerts"
WARNING = 10**21
CRITICAL = 10**24

_GAS = 1_000_000


@dataclass
class AlertScene:
    """``coin`` is a token whose contract emits any transfer."""

    node: Anvil
    stack: DevStack
    client: Client
    coin: str

    def deploy(self, language: str = "python") -> None:
        """The example as its README has it, with the watching function in this language."""
        yaml = (EXAMPLE / "dag.yaml").read_text().replace("chain_id: 31339", f"chain_id: {CHAIN_ID}")
        for name, folder in (("WATCH", language), ("ESCALATE", "escalate")):
            packed = io.BytesIO()
            zip_folder(EXAMPLE / folder, packed)
            packed.seek(0)
            bundle, _ = self.client.push_bundle(packed)
            yaml = yaml.replace(f"bundle: {name}", f"bundle: {bundle.bundle}")
        self.client.deploy(yaml.encode())

    def transfer(self, *amounts: int) -> int:
        """One transaction that moves these amounts, mined; the block's number."""
        self.node.send([transfer(self.node, self.coin, *amounts)])
        return self.node.mine()

    @contextmanager
    def table(self, dataset: str) -> Iterator[Table]:
        """A buffered dataset's rows as they are in Postgres, by the reader's role."""
        version = self.client.dataset(dataset).dataset_version
        with psycopg.connect(self.stack.handle.data_read_dsn, autocommit=True) as connection:
            yield Table(connection, sql.Identifier("data", f"d_{version.hex}"))


@dataclass
class Table:
    connection: psycopg.Connection
    name: sql.Identifier

    def rows(self, *columns: str) -> list[tuple[object, ...]]:
        """In the order of their keys; none while there is no table."""
        chosen = sql.SQL(", ").join(map(sql.Identifier, columns))
        query = sql.SQL("SELECT {} FROM {} ORDER BY 1").format(chosen, self.name)
        try:
            return self.connection.execute(query).fetchall()
        except psycopg.errors.UndefinedTable:
            return []


def transfer(node: Anvil, coin: str, *amounts: int) -> dict[str, str]:
    sender, receiver = node.accounts()[:2]
    data = movements(Movement(sender, receiver, amount) for amount in amounts)
    return {"from": sender, "to": coin, "gas": hex(_GAS), "input": data}


@contextmanager
def alert_scene(folder: Path) -> Iterator[AlertScene]:
    with running_anvil() as node:
        creation = {
            "from": node.accounts()[0],
            "gas": hex(_GAS),
            "input": "0x" + deployment(COIN).hex(),
        }
        [sent] = node.send([creation])
        node.mine()
        coin = node.call("eth_getTransactionReceipt", sent)["contractAddress"]
        pools = folder / "rpc.toml"
        pools.write_text(f'[pools.main]\n[[pools.main.endpoints]]\nname = "anvil"\nurl = "{node.url}"\n')
        pools.chmod(0o600)
        stack = DevStack(folder / "home", folder, "--rpc-pools", str(pools), workers=True)
        try:
            handle = stack.until_ready()
            with Client(handle.user_url, handle.user_token) as client:
                yield AlertScene(node, stack, client, coin)
        finally:
            stack.close()
