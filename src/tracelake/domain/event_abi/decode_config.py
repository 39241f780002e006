"""The configuration of ``decode_events``: which events, of which contracts.

    config:
      events: erc20_transfers                    # ready-made, or
      events: ["event Deposit(address indexed user, uint256 amount)", {type: event, name: …, inputs: […]}]
      addresses: ["0xa0b8…"]                     # of all contracts when left out

Whoever deploys hears of every problem with its place; the operator reads the same way.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tracelake.domain.errors import Invalid
from tracelake.domain.event_abi.json_entry import parse_entry
from tracelake.domain.event_abi.model import Event
from tracelake.domain.event_abi.signature import parse_signature
from tracelake.domain.event_abi.type_names import AbiProblem
from tracelake.domain.setting_checks import MAX_BLOCKS_PER_FILE, is_whole

KEYS = frozenset({"events", "addresses", "blocks_per_file"})
MAX_EVENTS = 200
MAX_ADDRESSES = 10_000

# Parameters are named as their columns are: names are no part of what is hashed.
PRESETS: Mapping[str, str] = {
    "erc20_transfers": (
        "event Transfer(address indexed from_address, address indexed to_address, uint256 value)"
    ),
    "erc721_transfers": (
        "event Transfer(address indexed from_address, address indexed to_address, uint256 indexed token_id)"
    ),
}
_ADDRESS = re.compile(r"0x[0-9a-fA-F]{40}")
_IS_WORD = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """``addresses`` empty: of every contract."""

    events: tuple[Event, ...]
    addresses: tuple[bytes, ...]
    blocks_per_file: int | None


def read_config(config: Mapping[str, Any]) -> DecodeConfig:
    for key, message in problems(config):
        raise Invalid("InvalidConfig", f"config.{key}: {message}")
    return DecodeConfig(
        tuple(_events(config["events"])),
        tuple(_addresses(config.get("addresses", []))),
        config.get("blocks_per_file"),
    )


def problems(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Pairs of key and what is wrong with it."""
    for key in sorted(set(config) - KEYS):
        yield key, f"decode_events has no such setting; it has {', '.join(sorted(KEYS))}"
    events: list[Event] = []
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
                f"is required: logs of the anonymous {nameless[0]} say nothing else to know them by",
            )
    size = config.get("blocks_per_file")
    if size is not None and not is_whole(size, 1, MAX_BLOCKS_PER_FILE):
        yield "blocks_per_file", f"must be a whole number from 1 to {MAX_BLOCKS_PER_FILE}"


def _events(given: object) -> Iterator[Event]:
    if given is None:
        raise AbiProblem(f"is required: {_forms()}")
    entries = given if isinstance(given, list) else [given]
    if len(entries) > 10 * MAX_EVENTS:
        raise AbiProblem(f"has {len(entries)} entries; at most {10 * MAX_EVENTS}")
    seen: dict[tuple[object, ...], str] = {}
    for index, entry in enumerate(entries):
        where = f"[{index}]: " if isinstance(given, list) else ""
        try:
            event = _event(entry)
        except AbiProblem as problem:
            raise AbiProblem(f"{where}{problem}") from None
        if event is None:
            continue
        if event.layout in seen:
            raise AbiProblem(f"{where}is the same event as {seen[event.layout]}")
        seen[event.layout] = f"[{index}]"
        yield event
    if not seen:
        raise AbiProblem(f"has no event: {_forms()}")
    if len(seen) > MAX_EVENTS:
        raise AbiProblem(f"has {len(seen)} events; at most {MAX_EVENTS}")


def _event(entry: object) -> Event | None:
    """None for what else stands in a contract's ABI: functions, errors."""
    if isinstance(entry, str):
        if _IS_WORD.fullmatch(entry) and entry not in PRESETS:
            raise AbiProblem(f"{entry!r} is not ready-made; there are {', '.join(sorted(PRESETS))}")
        event = parse_signature(PRESETS.get(entry, entry))
    elif isinstance(entry, Mapping):
        if entry.get("type", "event") != "event":
            return None
        event = parse_entry(entry)
    else:
        raise AbiProblem(f"must be {_forms()}")
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
        if isinstance(address, int):
            raise AbiProblem(f"[{index}]: is a number in YAML; put the address in quotes")
        if not isinstance(address, str) or not _ADDRESS.fullmatch(address):
            raise AbiProblem(f"[{index}]: {str(address)[:100]!r} is no address: 0x and 40 hex digits")
        yield bytes.fromhex(address[2:])


def _forms() -> str:
    made = ", ".join(sorted(PRESETS))
    return f"{made}, `event Name(type indexed name, …)`, an entry of a JSON ABI, or a list of these"
