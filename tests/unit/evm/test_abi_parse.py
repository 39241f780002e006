"""Event ABIs as people and compilers write them: what is taken, and what a mistake is told."""

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.abi_encoding import events
from tracelake.domain.dag.checks import Installation
from tracelake.domain.dag.parse import parse_dag
from tracelake.domain.errors import Invalid, InvalidDag
from tracelake.domain.event_abi import (
    AbiEvent,
    AbiProblem,
    AbiType,
    Array,
    Tuple,
    parse_entry,
    parse_signature,
)
from tracelake.domain.operators.decode_events import SPEC, read_abi_file, read_config
from tracelake.domain.runtimes import RuntimeTraits
from tracelake.evm.abi.decode_logs import topic0


def spelt(event: AbiEvent) -> str:
    """The event as Solidity has it."""

    def kind(each: AbiType) -> str:
        match each:
            case Array(item, length):
                return f"{kind(item)}[{'' if length is None else length}]"
            case Tuple(fields):
                return f"({', '.join(f'{kind(field.type)} {field.name}' for field in fields)})"
            case _:
                return each.canonical

    params = [f"{kind(p.type)} {'indexed' if p.indexed else ''} {p.name}" for p in event.params]
    return f"event {event.name}({', '.join(params)}) {'anonymous' if event.anonymous else ''};"


def entry(event: AbiEvent) -> dict[str, Any]:
    """The event as a compiler has it."""

    def fields(name: str, kind: AbiType) -> dict[str, Any]:
        suffix = ""
        while isinstance(kind, Array):
            suffix = f"[{'' if kind.length is None else kind.length}]{suffix}"
            kind = kind.item
        if isinstance(kind, Tuple):
            parts = [fields(field.name, field.type) for field in kind.fields]
            return {"name": name, "type": f"tuple{suffix}", "components": parts, "internalType": "struct S"}
        return {"name": name, "type": kind.canonical + suffix}

    inputs = [fields(param.name, param.type) | {"indexed": param.indexed} for param in event.params]
    return {"type": "event", "name": event.name, "inputs": inputs, "anonymous": event.anonymous}


@settings(deadline=None, max_examples=100)
@given(events())
def test_an_event_reads_the_same_from_solidity_and_from_json(event: AbiEvent) -> None:
    assert parse_signature(spelt(event)) == event
    assert parse_entry(entry(event)) == event
    assert parse_signature(event.written) == event
    assert read_abi_file(json.dumps([entry(event)]).encode()) == [event.written]


@settings(deadline=None, max_examples=200)
@given(st.text(alphabet=" event(){}[],;abuint256tuplebytes0indexed()\0é", max_size=60))
def test_any_text_is_an_event_or_a_problem(text: str) -> None:
    with suppress(AbiProblem):
        assert isinstance(parse_signature(text), AbiEvent)


def test_short_forms_mean_what_solidity_means() -> None:
    event = parse_signature("Transfer(address indexed, address indexed, uint)")
    assert event.signature == "Transfer(address,address,uint256)"
    assert (topic0(event) or b"").hex()[:8] == "ddf252ad"
    assert parse_signature("event E(int a, fixed b, ufixed c, tuple(uint x)[2][] d)").signature == (
        "E(int256,fixed128x18,ufixed128x18,(uint256)[2][])"
    )
    assert parse_signature("event event()").name == "event"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("event E(uint257 a)", "position 9: 'uint257' is not an ABI type"),
        ("event E(uint255 a)", "position 9: 'uint255' is not an ABI type"),
        ("event E(bytes33 a)", "position 9: 'bytes33' is not an ABI type"),
        ("event E(Pool pool)", "'Pool' is not an ABI type: write a struct as its fields in parentheses"),
        ("event E(byte b)", "'byte' is not an ABI type; write bytes1"),
        ("event E(uint a", "position 15: expected ',', found the end"),
        ("event E(uint a b)", "position 16: expected ',', found 'b'"),
        ("event E(uint a,)", "position 16: expected a type, found ')'"),
        ("event E(uint[0] a)", "position 9: an array has 1 to"),
        ("event E(() a)", "position 10: expected a type, found ')'"),
        ("event E((uint indexed a) b)", "only a parameter of the event itself can be indexed"),
        ("event E(uint a) returns", "position 17: 'returns' after the end of the event"),
        ("function f(uint a)", "position 10: expected '(', found 'f'"),
        ("", "position 1: expected the name of an event, found the end"),
        (f"event E({'(' * 50}uint a{') x' * 50})", "deep in each other"),
        (f"event E({'(' * 4000}uint a{')' * 4000})", "too many parentheses"),
        (f"event E(uint{'[]' * 20} a)", "more than 16 deep"),
        (f"event E(uint a{' ' * 10_000})", "longer than 10000 characters"),
    ],
)
def test_a_mistake_in_a_signature_is_told_with_its_place(text: str, told: str) -> None:
    with pytest.raises(AbiProblem) as caught:
        parse_signature(text)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("config", "key", "told"),
    [
        ({}, "events", "is required: erc20_transfers, erc721_transfers, native_transfers, `event Name"),
        ({"events": []}, "events", "has no event"),
        ({"events": [{"type": "function", "name": "f"}]}, "events", "has no event"),
        ({"events": "erc20_transfer"}, "events", "'erc20_transfer' is not ready-made; there are erc20_transfers"),
        ({"events": ["erc20_transfers", 7]}, "events", "[1]: must be erc20_transfers"),
        ({"events": ["erc20_transfers", "Transfer(address indexed a, address indexed b, uint c)"]}, "events",
         "[1]: is the same event as [0]"),
        ({"events": ["E(uint indexed a, uint indexed b, uint indexed c, uint indexed d)"]}, "events",
         "E has 4 indexed parameters; a log has room for 3"),
        ({"events": [{"name": "E", "inputs": [{"type": "uint7"}]}]}, "events", "[0]: inputs[0].type: 'uint7'"),
        ({"events": [{"name": "E", "inputs": [{"type": "tuple"}]}]}, "events",
         "inputs[0].components: must be a list of parameters"),
        ({"events": [{"name": "E", "inputs": [{"type": "tuple", "components": [{"type": "uint", "indexed": 1}]}]}]},
         "events", "inputs[0].components[0].indexed"),
        ({"events": [{"name": "E"}]}, "events", "inputs: must be a list"),
        ({"events": [{"name": "E F", "inputs": []}]}, "events", "[0]: name: must be the name"),
        ({"events": "E(uint a) anonymous"}, "addresses", "is required: logs of the anonymous event E"),
        ({"events": "erc20_transfers", "addresses": [0xABC]}, "addresses", "[0]: is a number in YAML; put"),
        ({"events": "erc20_transfers", "addresses": ["0x12"]}, "addresses", "[0]: '0x12' is no address"),
        ({"events": "erc20_transfers", "addresses": "0x" + "1" * 40}, "addresses", "must be a list"),
        ({"events": "erc20_transfers", "blocks_per_file": 0}, "blocks_per_file", "from 1 to 1000000"),
    ],
)  # fmt: skip
def test_a_mistake_in_the_config_is_told_with_its_key(config: dict[str, Any], key: str, told: str) -> None:
    [(where, message)] = SPEC.problems(config)
    assert where == key
    assert told in message
    with pytest.raises(Invalid, match=rf"config: {key}: "):
        read_config(config)


def test_a_setting_that_decode_events_does_not_have_is_refused() -> None:
    with pytest.raises(Invalid, match="config: preset: decode_events has no such setting"):
        read_config({"events": "erc20_transfers", "preset": 1})


def test_a_whole_contract_abi_may_be_given_and_its_functions_are_left_alone() -> None:
    config = read_config(
        {"events": [{"type": "constructor", "inputs": []}, {"type": "event", "name": "E", "inputs": []}]}
    )
    assert [event.name for event in config.events] == ["E"]


def test_events_that_contracts_share_are_one_and_those_written_twice_are_a_mistake() -> None:
    abi = {"abi": ["event A(uint a)", {"type": "function", "name": "f"}, "event A(uint other)", "event B()"]}
    assert [each.written for each in read_config({"events": abi}).events] == [
        "event A(uint256 a)",
        "event B()",
    ]
    assert len(read_config({"events": [abi, abi, "erc20_transfers"]}).events) == 3
    [(_, message)] = SPEC.problems({"events": [abi, "event B()"]})
    assert message == "[1]: is the same event as [0].abi[3]"


@pytest.mark.parametrize(
    ("events", "told"),
    [
        ({"abi": "./Token.json"}, "abi: './Token.json' is a file, which the client reads"),
        ([{"abi": "./Token.json"}], "[0].abi: './Token.json' is a file"),
        ({"abi": 7}, "abi: must be a file, or a list of events"),
        ({"abi": []}, "has no event"),
        ({"abi": ["event A()"], "only": ["A"]}, "abi: has 'only' beside it, and stands alone"),
        ({"abi": ["event A(uint7 a)"]}, "abi[0]: position 9: 'uint7' is not an ABI type"),
        ([f"event E{number}()" for number in range(5_001)], "has 5001 events; at most 5000"),
        ([f"event E(uint p{number}, uint8 p{number}, uint8[{number + 1}] x)" for number in range(200)],
         "has events with 600 parameters of different names or types, and each is a column; at most 500"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_the_abi_of_a_contract_is_told(events: Any, told: str) -> None:
    [(where, message)] = SPEC.problems({"events": events})
    assert where == "events"
    assert told in message


@pytest.mark.parametrize("name", ["a b", "a.b", "`a`", '"a"', "'a'", "é", "1a", "a-b", "a\0", "\u202e", " "])
def test_names_that_are_no_identifiers_are_refused(name: str) -> None:
    entries = [{"type": "event", "name": "E", "inputs": [{"type": "bool", "name": name}]}]
    [(_, message)] = SPEC.problems({"events": entries})
    assert "inputs[0].name: must be an identifier" in message
    with pytest.raises(AbiProblem):
        parse_signature(f"event E(bool {name}!)")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"{", "line 1, column 2: is not JSON"),
        (b"[\n  {,}]", "line 2, column 4: is not JSON"),
        (b"\xff\xfe\xfd", "is not UTF-8"),
        (b"[" * 100_000, "is nested too deep"),
        (b"7", "is not an ABI"),
        (b'{"bytecode": "0x"}', "is not an ABI"),
        (b"[]", "has no events"),
        (b'[{"type": "function"}]', "has no events"),
        (b"[7]", "[0]: must be an object"),
        (b'[{"type": "event", "name": "E", "inputs": [{"type": "uint7"}]}]', "[0]: inputs[0].type: 'uint7'"),
        (b'[{"type": "event", "name": "E", "inputs": [{"type": "bool", "name": "indexed"}]}]',
         "[0]: E has names that can't be written as text"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_an_abi_file_is_told_with_its_place(content: bytes, told: str) -> None:
    with pytest.raises(AbiProblem) as caught:
        read_abi_file(content)
    assert told in str(caught.value)


def test_a_compilers_file_may_have_more_than_the_abi() -> None:
    abi = [{"type": "event", "name": "E", "inputs": [], "anonymous": False}, {"type": "fallback"}]
    assert read_abi_file(json.dumps({"abi": abi, "bytecode": "0x"}).encode()) == ["event E()"]


def test_a_deploy_refuses_a_bad_abi_where_it_stands() -> None:
    text = """
name: chain
jobs:
  - name: src
    activation: source
    runtime: dispatcher
    source: { kind: manual }
    outputs: 1
  - name: logs
    activation: reactive
    runtime: ecs_spark
    operator: decode_events
    execution_strategy: PerPartition
    inputs: [{ from: { job: src, output: 0 } }]
    config:
      events: ["event Deposit(adress user)"]
"""
    with pytest.raises(InvalidDag) as refused:
        parse_dag(
            text, Installation({"dispatcher": RuntimeTraits(False, True), "ecs_spark": RuntimeTraits(False)})
        )
    [problem] = refused.value.problems
    assert (problem.field, problem.line) == ("jobs[1].config.events", 16)
    assert "[0]: position 15: 'adress' is not an ABI type" in problem.message
