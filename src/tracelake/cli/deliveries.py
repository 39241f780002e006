"""``tracelake deliveries``: what is sent to receivers, what waits, and what was given up."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from tracelake.cli.show import cell, counted, print_fields, print_heading, print_json, print_table
from tracelake.cli.stack import HIGHEST_ID, HomeOption, JsonOption, TokenOption, UrlOption, connect
from tracelake.domain.errors import Invalid

if TYPE_CHECKING:
    from tracelake.contracts.deliveries import DeliveryDetail, DeliveryPaused, DeliverySummary, SkippedMessage

DeliveryArgument = Annotated[str, typer.Argument(help="The delivery, with its DAG.", metavar="DAG/DELIVERY")]
MessagesArgument = Annotated[
    list[int] | None, typer.Argument(min=1, max=HIGHEST_ID, help="Only these.", metavar="[ID]...")
]


class State(StrEnum):
    WAITING = "waiting"
    SENT = "sent"
    DEAD = "dead"
    DROPPED = "dropped"
    UNCHANGED = "unchanged"


deliveries_app = typer.Typer(help="Rows sent to webhooks, chat and mail.", no_args_is_help=True)


@deliveries_app.command("list")
def list_deliveries(
    url: UrlOption = None, token: TokenOption = None, home: HomeOption = None, as_json: JsonOption = False
) -> None:
    """List deliveries: what each has sent, what waits, and since when it fails.

    Examples:

        tracelake deliveries list

        tracelake deliveries list --json
    """
    with connect(url, token, home) as client:
        page = client.deliveries()
    if as_json:
        print_json(page)
    elif not page.deliveries:
        typer.echo("no deliveries")
    else:
        print_deliveries(page.deliveries)


@deliveries_app.command()
def show(
    name: DeliveryArgument,
    state: Annotated[
        State | None, typer.Option(case_sensitive=False, help="Only messages in this state.")
    ] = None,
    limit: Annotated[int, typer.Option(min=0, max=1000, help="Maximum number of messages.")] = 20,
    url: UrlOption = None,
    token: TokenOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a delivery and its newest messages, with the answers of the receiver.

    Examples:

        tracelake deliveries show alerts/ops

        tracelake deliveries show alerts/ops --state dead
    """
    dag, delivery = _parts(name)
    with connect(url, token, home) as client:
        found = client.delivery(dag, delivery, state=state.value if state else None, limit=limit)
    print_json(found) if as_json else print_delivery(found)


@deliveries_app.command()
def replay(
    name: DeliveryArgument,
    ids: MessagesArgument = None,
    url: UrlOption = None,
    token: TokenOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Send dead letters again, all of the delivery's or some, each with all its tries. One whose record has a newer
    message isn't: it would replace that at the receiver.

    Examples:

        tracelake deliveries replay alerts/ops

        tracelake deliveries replay alerts/ops 17 18
    """
    dag, delivery = _parts(name)
    with connect(url, token, home) as client:
        done = client.replay_delivery(dag, delivery, ids or None)
    if as_json:
        print_json(done)
    else:
        typer.echo(_number_of(done.replayed, "waits again", "wait again"))
        for each in done.skipped:
            typer.echo(f"message {each.message_id} {_why_skipped(name, each)}", err=True)
    if not done.replayed and done.skipped:
        raise typer.Exit(1)


@deliveries_app.command()
def drop(
    name: DeliveryArgument,
    ids: MessagesArgument = None,
    everything: Annotated[bool, typer.Option("--all", help="All of the delivery's.")] = False,
    url: UrlOption = None,
    token: TokenOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Give up dead letters for good: they are never sent, and no longer counted.

    Examples:

        tracelake deliveries drop alerts/ops 17

        tracelake deliveries drop alerts/ops --all
    """
    # Dropping is final, so leaving the ids out doesn't mean all.
    if bool(ids) == everything:
        raise typer.BadParameter("name dead letters, or give --all", param_hint="ID")
    dag, delivery = _parts(name)
    with connect(url, token, home) as client:
        done = client.drop_messages(dag, delivery, ids or (), everything=everything)
    if as_json:
        print_json(done)
    else:
        typer.echo(_number_of(done.dropped, "was dropped", "were dropped"))
        _print_not_dead(name, done.not_dead)
    if not done.dropped and done.not_dead:
        raise typer.Exit(1)


@deliveries_app.command()
def pause(
    name: DeliveryArgument,
    url: UrlOption = None,
    token: TokenOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Send nothing until the delivery is resumed; rows wait.

    Examples:

        tracelake deliveries pause alerts/ops
    """
    dag, delivery = _parts(name)
    with connect(url, token, home) as client:
        _print_paused(name, client.pause_delivery(dag, delivery), as_json)


@deliveries_app.command()
def resume(
    name: DeliveryArgument,
    url: UrlOption = None,
    token: TokenOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Go on after a pause, or after the receiver answered 410 (gone).

    Examples:

        tracelake deliveries resume alerts/ops
    """
    dag, delivery = _parts(name)
    with connect(url, token, home) as client:
        _print_paused(name, client.resume_delivery(dag, delivery), as_json)


def _parts(name: str) -> tuple[str, str]:
    dag, slash, delivery = name.partition("/")
    if not slash or not dag or not delivery:
        raise Invalid("InvalidName", f"a delivery is named DAG/DELIVERY, not {name!r}")
    return dag, delivery


def _number_of(count: int, one: str, many: str) -> str:
    return f"{counted(count, 'message')} {one if count == 1 else many}"


def _named(ids: Sequence[int], one: str, many: str) -> str:
    return f"{', '.join(map(str, ids))} {one if len(ids) == 1 else many}"


def _why_skipped(name: str, message: SkippedMessage) -> str:
    if message.state == "dead":
        drop = f"tracelake deliveries drop {name} {message.message_id}"
        return f"can't be sent: {cell(message.error)}; drop it with: {drop}"
    return f"isn't sent again, it is {message.state}: {cell(message.error)}"


def _print_not_dead(name: str, ids: Sequence[int]) -> None:
    if ids:
        found = _named(ids, "is no dead letter", "are no dead letters")
        typer.echo(f"{found}: tracelake deliveries show {name}", err=True)


def _print_paused(name: str, paused: DeliveryPaused, as_json: bool) -> None:
    if as_json:
        print_json(paused)
    elif paused.paused_by:
        typer.echo(f"{name} is paused ({', '.join(paused.paused_by)})")
    else:
        typer.echo(f"{name} goes on")


def print_deliveries(deliveries: Sequence[DeliverySummary]) -> None:
    print_table(
        ("DELIVERY", "DATASET", "TO", "STATUS", "WAITING", "SENT", "RETRACTED", "DEAD", "ERROR"),
        [
            (
                f"{each.dag_name}/{each.name}",
                each.dataset,
                each.to,
                each.status,
                each.waiting,
                each.sent,
                each.retracted,
                each.dead,
                _error(each),
            )
            for each in deliveries
        ],
    )


def print_delivery(delivery: DeliveryDetail) -> None:
    print_fields(
        [
            ("delivery", f"{delivery.dag_name}/{delivery.name}"),
            ("dataset", delivery.dataset),
            ("where", delivery.where),
            ("to", delivery.to),
            ("when", delivery.when),
            ("template", delivery.template),
            ("key", delivery.key),
            ("status", delivery.status),
            ("paused by", ", ".join(delivery.paused_by) or None),
            ("waiting", delivery.waiting),
            ("oldest", None if delivery.oldest_seconds is None else f"{delivery.oldest_seconds:.0f} s"),
            ("behind", delivery.behind or None),
            ("waits for", "; ".join(_waits_for(delivery)) or None),
            ("sent", delivery.sent),
            ("retracted", delivery.retracted),
            ("dead letters", delivery.dead),
            ("failing since", delivery.failing_since),
            ("last error", _last_error(delivery)),
            ("last sent", delivery.last_sent_at),
            ("task", f"{delivery.task_id} {delivery.task_status}" if delivery.task_id else None),
        ]
    )
    if delivery.messages:
        print_heading("Messages")
        print_table(
            ("ID", "RECORD", "REVISION", "TYPE", "STATE", "TRIES", "ANSWER", "MADE", "NEXT TRY", "ERROR"),
            [
                (
                    each.message_id,
                    each.id,
                    each.revision,
                    each.kind,
                    each.state,
                    each.tries,
                    each.status,
                    each.created_at,
                    each.next_try_at,
                    each.error,
                )
                for each in delivery.messages
            ],
        )


def print_troubled(deliveries: Sequence[DeliverySummary]) -> None:
    """Those that need attention, each with the command to continue with."""
    found = [each for each in deliveries if each.status in ("failing", "gone") or each.dead]
    if not found:
        return
    print_heading("deliveries in trouble")
    rows = []
    for each in found:
        name = f"{each.dag_name}/{each.name}"
        rows.append((name, each.status, each.waiting, each.dead, _error(each), _next(name, each)))
    print_table(("DELIVERY", "STATUS", "WAITING", "DEAD", "ERROR", "NEXT"), rows, indent=2)


def print_waiting_for_blocks(deliveries: Sequence[DeliverySummary]) -> None:
    """Those of which rows wait to be final."""
    rows = [
        (f"{each.dag_name}/{each.name}", each.behind, waits)
        for each in deliveries
        for waits in _waits_for(each)
    ]
    if rows:
        print_heading("deliveries that wait for finality")
        print_table(("DELIVERY", "BEHIND", "WAITS FOR"), rows, indent=2)


def _waits_for(delivery: DeliverySummary) -> list[str]:
    return [f"block {each.block} of {each.producer}, since {cell(each.since)}" for each in delivery.waits_for]


def _next(name: str, delivery: DeliverySummary) -> str:
    action = {"gone": "resume", "failing": "show"}.get(delivery.status, "replay")
    # A replay of what is too large would do nothing.
    if action == "replay" and delivery.too_large and not delivery.replayable:
        return f"tracelake deliveries drop {name} {' '.join(map(str, delivery.too_large))}"
    return f"tracelake deliveries {action} {name}"


def _last_error(delivery: DeliverySummary) -> str | None:
    error, at, sent_at = delivery.last_error, delivery.last_error_at, delivery.last_sent_at
    if error is None or at is None:
        return error
    over = delivery.failing_since is None and sent_at is not None and sent_at >= at
    return f"{error} (at {cell(at)}{'; a try has succeeded since' if over else ''})"


def _error(delivery: DeliverySummary) -> str | None:
    """The error that matters now: while the delivery fails that of its last try, or else that of the newest dead
    letter. An error after which a try succeeded is over."""
    if delivery.failing_since is not None or delivery.status == "gone":
        return cell(delivery.last_error) if delivery.last_error is not None else None
    dead = delivery.newest_dead
    return cell(dead.error) if dead is not None and dead.error is not None else None
