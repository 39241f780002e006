"""Events as compilers write them: entries of a contract's JSON ABI."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tracelake.domain.event_abi.model import AbiType, Event, Param, Tuple
from tracelake.domain.event_abi.type_names import MAX_DEPTH, AbiProblem, array, check_depth, elementary

_NAME = re.compile(r"[A-Za-z_$][A-Za-z0-9_$]*", re.ASCII)
_SUFFIX = re.compile(r"\[([0-9]{0,20})\]", re.ASCII)
_SPELT = re.compile(r"([a-z0-9]+)((?:\[[0-9]{0,20}\])*)", re.ASCII | re.IGNORECASE)


def parse_entry(entry: Mapping[str, Any]) -> Event:
    """Keys that compilers add, such as ``internalType``, are of no interest here."""
    name = entry.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise AbiProblem("name: must be the name of the event")
    anonymous = entry.get("anonymous", False)
    if not isinstance(anonymous, bool):
        raise AbiProblem("anonymous: must be true or false")
    return Event(name, _params(entry.get("inputs"), "inputs", in_event=True), anonymous)


def _params(given: object, where: str, *, in_event: bool, depth: int = 0) -> tuple[Param, ...]:
    if not isinstance(given, list) or not (given or in_event):
        raise AbiProblem(f"{where}: must be a list of parameters")
    if depth > MAX_DEPTH:
        raise AbiProblem(f"{where}: too deep")
    return tuple(_param(each, f"{where}[{index}]", in_event, depth) for index, each in enumerate(given))


def _param(given: object, where: str, in_event: bool, depth: int) -> Param:
    if not isinstance(given, Mapping):
        raise AbiProblem(f"{where}: must be an object with name and type")
    name, indexed = given.get("name", ""), given.get("indexed", False)
    if not isinstance(name, str) or not (name == "" or _NAME.fullmatch(name)):
        raise AbiProblem(f"{where}.name: must be an identifier")
    if not isinstance(indexed, bool) or (indexed and not in_event):
        raise AbiProblem(f"{where}.indexed: must be true or false, and only a parameter of the event has it")
    return Param(name, _type(given, where, depth), indexed)


def _type(given: Mapping[str, Any], where: str, depth: int) -> AbiType:
    spelt = given.get("type")
    found = _SPELT.fullmatch(spelt) if isinstance(spelt, str) and len(spelt) <= 200 else None
    if found is None:
        raise AbiProblem(f"{where}.type: must be the name of a type")
    kind: AbiType
    try:
        if found[1] == "tuple":
            parts = _params(given.get("components"), f"{where}.components", in_event=False, depth=depth + 1)
            kind = Tuple(parts)
            check_depth(kind)
        else:
            kind = elementary(found[1])
        for length in _SUFFIX.findall(found[2]):
            kind = array(kind, int(length) if length else None)
    except AbiProblem as problem:
        raise problem if str(problem).startswith(where) else AbiProblem(f"{where}.type: {problem}") from None
    return kind
