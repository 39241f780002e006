"""``tracelake database``: set up a data database of one's own, and what both need after a restore."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tracelake.cli.show import print_json
from tracelake.cli.stack import DEFAULT_HOME, JsonOption
from tracelake.domain.errors import Conflict, Invalid

if TYPE_CHECKING:
    from tracelake.dev.home import Home

database_app = typer.Typer(
    help="The databases: setting one up, and what they need after a restore.", no_args_is_help=True
)

DatabaseHome = Annotated[
    Path, typer.Option("--home", readable=False, help="The home with keys, tokens and passwords.")
]
StateDsn = Annotated[
    str | None, typer.Option(envvar="TRACELAKE_STATE_DSN", help="State database (prefer the variable).")
]
QueueDsn = Annotated[
    str | None, typer.Option(envvar="TRACELAKE_QUEUE_DSN", help="Queue database (prefer the variable).")
]
DataDsn = Annotated[
    str | None,
    typer.Option(
        envvar="TRACELAKE_DATA_OWNER_DSN", help="Data database, by its owner (prefer the variable)."
    ),
]


@database_app.command()
def install(
    home: DatabaseHome = DEFAULT_HOME,
    state_dsn: StateDsn = None,
    queue_dsn: QueueDsn = None,
    data_dsn: DataDsn = None,
    env_file: Annotated[
        Path | None,
        typer.Option(help="Where the addresses for workers, sinks and the Query Service go, mode 0600."),
    ] = None,
    new_passwords: Annotated[
        bool,
        typer.Option(
            "--new-passwords", help="Give the two logins new passwords, for the whole installation."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Set up the data database on a Postgres of your own: its tables, and the roles that commit and read.

    Passwords are made at the first install and kept in the database; a further home gets copies of them. Installing
    again is safe: it brings the tables up to this version and renews grants and passwords. `--env-file` also needs
    the state and the queue database, and is read by `set -a; . FILE` or by what starts the processes. (State and
    queue are set up by the Dispatcher.)

    Examples:

        TRACELAKE_DATA_OWNER_DSN=postgresql://… tracelake database install --home ./home

        tracelake database install --home ./home --env-file workers.env
    """
    import asyncio

    from tracelake.dev.data_roles import install_data
    from tracelake.dev.home import Home
    from tracelake.hot.install import open_databases
    from tracelake.store.installation import is_installed, join_by_dsn

    if data_dsn is None:
        raise Invalid("DsnMissing", "say which database: --data-dsn, or TRACELAKE_DATA_OWNER_DSN")
    if env_file is not None and (state_dsn is None or queue_dsn is None):
        raise Invalid(
            "DsnMissing", "--env-file needs TRACELAKE_STATE_DSN and TRACELAKE_QUEUE_DSN to name them"
        )
    place = Home(home)
    installed = install_data(place, data_dsn, new_passwords=new_passwords)
    if env_file is not None and state_dsn is not None and queue_dsn is not None:
        if asyncio.run(is_installed(state_dsn)):
            asyncio.run(join_by_dsn(state_dsn, place.copies))
        place.write(env_file.absolute(), _environment(place, state_dsn, queue_dsn, data_dsn).encode())
    still_open = asyncio.run(open_databases(data_dsn))
    if as_json:
        print_json(
            {
                "applied": installed.applied,
                "env_file": None if env_file is None else str(env_file),
                "open_databases": still_open,
                "left_to_everybody": installed.left_to_everybody,
            }
        )
        return
    typer.echo(f"the data database is ready ({', '.join(installed.applied) or 'as it was'})")
    if installed.left_to_everybody:
        typer.echo(
            f"whoever can log in to the data database can use {', '.join(installed.left_to_everybody)}: only a "
            "superuser can take that back, by installing once"
        )
    if still_open:
        typer.echo(
            f"operators' logins can also connect to {', '.join(still_open)} on this server, as everybody can: "
            "REVOKE CONNECT, TEMPORARY ON DATABASE … FROM PUBLIC closes one"
        )
    if env_file is not None:
        typer.echo(f"wrote {env_file}")


@database_app.command()
def rotate(
    logins: Annotated[
        list[str] | None,
        typer.Argument(help="queue, catalog, audit.  [default: all three]", show_default=False),
    ] = None,
    home: DatabaseHome = DEFAULT_HOME,
    state_dsn: StateDsn = None,
    as_json: JsonOption = False,
) -> None:
    """Give the shared logins of the queue and of the state database new passwords, for the whole installation.

    Running Dispatchers carry them over to Postgres and to their homes within seconds. Workers, sinks and Query
    Services that were told the old ones need the new ones and a restart (`tracelake database install --env-file`
    writes them; `tracelake dev` is simply started again). Passwords come from `TRACELAKE_QUEUE_PASSWORD`,
    `TRACELAKE_CATALOG_PASSWORD` and `TRACELAKE_AUDIT_PASSWORD`, or are made. Without a DSN the stack that runs on
    the home is meant.

    Examples:

        TRACELAKE_STATE_DSN=postgresql://… tracelake database rotate

        tracelake database rotate queue --home ./home
    """
    import asyncio
    import os

    from tracelake.cli.home_stack import stack_on
    from tracelake.store.installation import PASSWORDS, given_passwords, new_password, rotate_passwords

    chosen = [f"{name}_password" for name in logins or []] or list(PASSWORDS)
    if unknown := [name for name in chosen if name not in PASSWORDS]:
        raise Invalid(
            "NoSuchLogin",
            f"there is no login {unknown[0].removesuffix('_password')!r}: queue, catalog, audit",
        )
    dsn = state_dsn or stack_on(home, ["TRACELAKE_STATE_DSN"]).state_dsn
    given = given_passwords(os.environ)
    asyncio.run(rotate_passwords(dsn, {name: given.get(name) or new_password() for name in chosen}))
    names = [name.removesuffix("_password") for name in chosen]
    if as_json:
        print_json({"rotated": names})
    else:
        typer.echo(f"new passwords for {', '.join(names)}; restart who uses them")


@database_app.command()
def restored(
    home: DatabaseHome = DEFAULT_HOME,
    state_dsn: StateDsn = None,
    data_dsn: DataDsn = None,
    as_json: JsonOption = False,
) -> None:
    """Make restored databases safe to use: run it after a restore, before anything is started.

    Epochs go on beyond all that were drawn before, also after the backup, and fences of attempts from then are
    forgotten, so that none of these can commit and none keeps a new one away. Without DSNs the home's own databases
    are meant. Doing it twice does no harm.

    Examples:

        tracelake database restored --home ./home

        TRACELAKE_STATE_DSN=… TRACELAKE_DATA_OWNER_DSN=… tracelake database restored
    """
    import asyncio

    from tracelake.hot.restored import forget_fences
    from tracelake.store.restored import advance_epochs

    if (state_dsn is None) != (data_dsn is None):
        raise Invalid(
            "DsnMissing", "TRACELAKE_STATE_DSN and TRACELAKE_DATA_OWNER_DSN go together, or neither is given"
        )
    with ExitStack() as stack:
        if state_dsn is None or data_dsn is None:
            state_dsn, data_dsn = stack.enter_context(_embedded(home))
        epoch = asyncio.run(advance_epochs(state_dsn))
        fences = asyncio.run(forget_fences(data_dsn))
    if as_json:
        print_json({"epoch": epoch, "fences": fences})
    else:
        typer.echo(f"epochs go on from {epoch:,}; {fences:,} fences were forgotten")


def _environment(place: Home, state_dsn: str, queue_dsn: str, data_dsn: str) -> str:
    from tracelake.dev.role_dsn import RoleDsns
    from tracelake.tokens.worker_tokens import first_token

    dsns = RoleDsns.of(place, state=state_dsn, queue=queue_dsn, data=data_dsn)
    lines = {
        "TRACELAKE_WORKER_TOKEN": first_token(place.worker_tokens),
        **dsns.for_workers(),
        **dsns.for_queries(),
    }
    return "".join(f"{name}='{value}'\n" for name, value in lines.items())


@contextmanager
def _embedded(home: Path) -> Iterator[tuple[str, str]]:
    """The home's own databases, which nobody else may be using."""
    from tracelake.dev.home import DATA_DATABASE, STATE_DATABASE, Home
    from tracelake.embedded_postgres import Cluster

    if not (home / "postgres").is_dir():
        raise Invalid("NoDatabases", f"{home} has no databases of its own: name them by their DSNs")
    place = Home(home)
    with ExitStack() as stack:
        try:
            stack.enter_context(place.locked())
        except Conflict:
            raise Conflict("HomeInUse", f"a stack runs on {home}: stop it first") from None
        state = stack.enter_context(Cluster(place.state_cluster, name="state"))
        data = stack.enter_context(Cluster(place.data_cluster, name="data"))
        yield state.dsn(STATE_DATABASE), data.dsn(DATA_DATABASE)
