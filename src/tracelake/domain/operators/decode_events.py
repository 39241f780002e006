"""The declaration of ``decode_events``: which events, of which contracts.

    config:
      events: erc20_transfers                    # ready-made, or
      events: ["event Deposit(address indexed user, uint256 amount)", {type: event, name: …, inputs: […]}]
      events: { abi: ./abis/Token.json }         # all events of a contract, from a file beside the DAG's
      addresses: ["0xa0b8…"]                     # of all contracts when left out

A deploy reports every problem with its place; the operator reads the config in the same way. The client
reads a file, and the deployed version has its events in place of the path (``read_abi_file``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from msgspec import UNSET, Struct, UnsetType

from tracelake.domain.dag.model import Activation, Storage
from tracelake.domain.event_abi import (
    SYSTEM_ADDRESS,
    AbiEvent,
    AbiProblem,
    Emitter,
    parse_entry,
    parse_signature,
)
from tracelake.domain.operators.shared_settings import FILES, BlocksPerFile
from tracelake.domain.operators.spec import FileSetting, OperatorSpec, Setting, model_problems
from tracelake.domain.runtimes import ECS_PYTHON, ECS_SPARK

MAX_EVENTS = 5_000
MAX_PARAMETERS = 500
"""Parameters with different names or types: each is a column, or three in files."""
MAX_ADDRESSES = 10_000
_ABI = "abi"

# Parameters are named as their columns are: names are no part of what is hashed.
_TRANSFER = "event Transfer(address indexed from_address, address indexed to_address, uint256 value)"
_ERC721_TRANSFER = (
    "event Transfer(address indexed from_address, address indexed to_address, uint256 indexed token_id)"
)
PRESETS: Mapping[str, AbiEvent] = {
    "erc20_transfers": replace(parse_signature(_TRANSFER), emitter=Emitter.CONTRACT),
    "erc721_transfers": replace(parse_signature(_ERC721_TRANSFER), emitter=Emitter.CONTRACT),
    "native_transfers": replace(parse_signature(_TRANSFER), emitter=Emitter.PROTOCOL),
}
_ADDRESS = re.compile(r"0x[0-9a-fA-F]{40}")
_IS_WORD = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """``addresses`` empty: of every contract."""

    events: tuple[AbiEvent, ...]
    addresses: tuple[bytes, ...]
    blocks_per_file: int | None


def read_config(config: Mapping[str, Any]) -> DecodeConfig:
    given = SPEC.read(config)
    events = tuple(_events(given.events))
    addresses = tuple(_addresses([] if given.addresses is UNSET else given.addresses))
    if not addresses and all(event.emitter is Emitter.PROTOCOL for event in events):
        # As a list of addresses it is a condition where the rows are stored.
        addresses = (SYSTEM_ADDRESS,)
    return DecodeConfig(events, addresses, given.blocks_per_file)


def _problems(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    events: list[AbiEvent] = []
    try:
        events = list(_events(config.get("events")))
    except AbiProblem as problem:
        yield "events", str(problem)
    try:
        addresses = list(_addresses(config.get("addresses", [])))
    except AbiProblem as problem:
        yield "addresses", str(problem)
    else:
        if not addresses and (nameless := [event.name for event in events if event.anonymous]):
            yield (
                "addresses",
                f"is required: logs of the anonymous event {nameless[0]} can only be identified by contract",
            )
    # The model has only the shapes of these two: its messages would say less.
    yield from model_problems(DecodeEventsSettings, config, but=("events", "addresses"))


def _events(given: object) -> Iterator[AbiEvent]:
    if given is None:
        raise AbiProblem(f"is required: {_forms()}")
    seen: dict[tuple[object, ...], str] = {}
    count = 0
    params: set[tuple[str, str, bool]] = set()
    for number, (where, entry, of_contract) in enumerate(_entries(given)):
        # A contract's ABI also lists functions and errors, which are skipped.
        if number >= 10 * MAX_EVENTS:
            raise AbiProblem(f"has more than {10 * MAX_EVENTS} entries")
        prefix = f"{where}: " if where else ""
        try:
            event = _event(entry)
        except AbiProblem as problem:
            raise AbiProblem(f"{prefix}{problem}") from None
        if event is None:
            continue
        matches = event.matches
        if clash := [seen[match] for match in matches if match in seen]:
            # Contracts share events; one that is written out twice is a mistake.
            if of_contract:
                continue
            raise AbiProblem(f"{prefix}is the same event as {clash[0]}")
        seen |= dict.fromkeys(matches, where)
        count += 1
        params |= {
            (param.name.lower() or f"arg{place}", param.type.canonical, param.hashed)
            for place, param in enumerate(event.params)
        }
        yield event
    if not seen:
        raise AbiProblem(f"has no event: {_forms()}")
    if count > MAX_EVENTS:
        raise AbiProblem(f"has {count} events; at most {MAX_EVENTS}")
    if len(params) > MAX_PARAMETERS:
        raise AbiProblem(
            f"has events with {len(params)} parameters of different names or types, and each is a column; "
            f"at most {MAX_PARAMETERS}: use several jobs"
        )


def _entries(given: object) -> Iterator[tuple[str, object, bool]]:
    """The place of each entry, the entry, and whether it is of a contract's ABI."""
    for index, entry in enumerate(given if isinstance(given, list) else [given]):
        where = f"[{index}]" if isinstance(given, list) else ""
        if not isinstance(entry, Mapping) or _ABI not in entry:
            yield where, entry, False
            continue
        place = f"{where}.{_ABI}" if where else _ABI
        inside = entry[_ABI]
        if isinstance(inside, str):
            raise AbiProblem(
                f"{place}: {inside[:200]!r} is a file, which the client reads: deploy by "
                "`tracelake deploy FILE` or `client.deploy(yaml, folder=…)`"
            )
        if not isinstance(inside, list):
            raise AbiProblem(f"{place}: must be a file, or a list of events")
        if others := sorted(set(entry) - {_ABI}):
            raise AbiProblem(f"{place}: has {others[0]!r} beside it, and stands alone")
        yield from ((f"{place}[{number}]", each, True) for number, each in enumerate(inside))


def read_abi_file(content: bytes) -> list[str]:
    """The events of a contract's JSON ABI as text. Compilers write the ABI alone, or with the contract's code and
    more around it, as ``abi``."""
    try:
        read = json.loads(content)
    except UnicodeDecodeError:
        raise AbiProblem("is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise AbiProblem(f"line {error.lineno}, column {error.colno}: is not JSON: {error.msg}") from None
    except RecursionError:
        raise AbiProblem("is nested too deep") from None
    entries = read.get(_ABI) if isinstance(read, dict) else read
    if not isinstance(entries, list):
        raise AbiProblem("is not an ABI: it must be a list of entries, or an object with one as `abi`")
    found: dict[tuple[object, ...], str] = {}
    for index, entry in enumerate(entries):
        try:
            event = _event(entry) if isinstance(entry, Mapping) else _refuse_entry()
            if event is None:
                continue
            # A parameter called `indexed` is none that a compiler writes, and would be read as another event.
            if parse_signature(event.written) != event:
                raise AbiProblem(f"{event.name} has names that can't be written as text")
        except AbiProblem as problem:
            raise AbiProblem(f"[{index}]: {problem}") from None
        found.setdefault(event.layout, event.written)
    if not found:
        raise AbiProblem("has no events")
    return list(found.values())


def _refuse_entry() -> AbiEvent:
    raise AbiProblem("must be an object")


def _event(entry: object) -> AbiEvent | None:
    """None for the other entries of a contract's ABI: functions, errors."""
    if isinstance(entry, str):
        if _IS_WORD.fullmatch(entry) and entry not in PRESETS:
            raise AbiProblem(f"{entry!r} is not ready-made; there are {', '.join(sorted(PRESETS))}")
        event = PRESETS[entry] if entry in PRESETS else parse_signature(entry)
    elif isinstance(entry, Mapping):
        if entry.get("type", "event") != "event":
            return None
        event = parse_entry(entry)
    else:
        raise AbiProblem(f"must be {_forms()}")
    # A log has four topics, and the first is the signature unless the event is anonymous.
    allowed = 4 if event.anonymous else 3
    if len(event.indexed) > allowed:
        raise AbiProblem(
            f"{event.name} has {len(event.indexed)} indexed parameters; a log has room for {allowed}"
        )
    return event


def _addresses(given: object) -> Iterator[bytes]:
    if not isinstance(given, list):
        raise AbiProblem("must be a list of addresses")
    if len(given) > MAX_ADDRESSES:
        raise AbiProblem(
            f"has {len(given)} entries; at most {MAX_ADDRESSES}: filter with `where`, or not at all"
        )
    for index, address in enumerate(given):
        # YAML reads an address without quotes as a hexadecimal number.
        if isinstance(address, int):
            raise AbiProblem(f"[{index}]: is a number in YAML; put the address in quotes")
        if not isinstance(address, str) or not _ADDRESS.fullmatch(address):
            raise AbiProblem(f"[{index}]: {str(address)[:100]!r} is no address: 0x and 40 hex digits")
        yield bytes.fromhex(address[2:])


def _forms() -> str:
    made = ", ".join(sorted(PRESETS))
    return f"{made}, `event Name(type indexed name, …)`, an entry of a JSON ABI, {{abi: FILE}}, or a list of these"


class DecodeEventsSettings(Struct, frozen=True, kw_only=True):
    events: Annotated[
        str | dict[str, Any] | list[str | dict[str, Any]],
        Setting(
            "`erc20_transfers`, `erc721_transfers`, `native_transfers`, `event Name(type indexed name, …)`, an "
            "entry of a JSON ABI, `{abi: ./abis/Token.json}` (a file in the DAG's folder), or a list of these."
        ),
    ]
    addresses: Annotated[
        list[str] | UnsetType, Setting("Only logs of these contracts; all when left out.")
    ] = UNSET
    blocks_per_file: Annotated[BlocksPerFile | None, FILES] = None


SPEC = OperatorSpec(
    "decode_events",
    DecodeEventsSettings,
    checks=_problems,
    files=(FileSetting("events", _ABI, read_abi_file),),
    about="Logs into typed columns by the ABI of their events ([chains](chains.md#decoded-events)).",
    reads="one table of logs, hot or cold",
    writes="the log's columns without topics and data, then `event`, then "
    "[a column per parameter](chains.md#decoded-events)",
    runtimes=(ECS_SPARK, ECS_PYTHON),
    function="tracelake.operators.decode_events.operator:decode_events",
    activation=Activation.REACTIVE,
    outputs=("events",),
    storage=Storage.PARQUET,
    storages=frozenset({Storage.PARQUET, Storage.POSTGRES}),
)
