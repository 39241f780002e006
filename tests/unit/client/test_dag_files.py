"""Files that a DAG names become a part of the text that is deployed; what can't be read is told with its place."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from tracelake.cli.main import app
from tracelake.client import Client
from tracelake.client.dag_files import MAX_FILE, resolve_files
from tracelake.contracts.problem import encode_problem, problem_of
from tracelake.domain.dag.problems import plain
from tracelake.domain.dag.yaml_tree import read_tree
from tracelake.domain.errors import DagProblem, InvalidDag
from tracelake.testing import check_dag

DAG = """# café: a comment before, which isn't ASCII
name: chain
jobs:
  - name: src
    activation: source
    runtime: dispatcher
    source: { kind: manual }
    outputs: 1
  - name: events
    activation: reactive
    runtime: ecs_spark
    operator: decode_events
    execution_strategy: PerPartition
    inputs: [{ from: { job: src, output: 0 } }]
    config: CONFIG
"""
LINE = 15
TRANSFER = {
    "type": "event",
    "name": "Transfer",
    "inputs": [
        {"name": "from", "type": "address", "indexed": True, "internalType": "address"},
        {"name": "to", "type": "address", "indexed": True},
        {"name": "value", "type": "uint256", "indexed": False},
    ],
}
PAUSED = {"type": "event", "name": "Paused", "inputs": [], "anonymous": False}
TRANSFER_TEXT = "event Transfer(address indexed from, address indexed to, uint256 value)"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    abis = tmp_path / "dags" / "abis"
    abis.mkdir(parents=True)
    (abis / "Token.json").write_text(json.dumps([TRANSFER, {"type": "function", "name": "f", "inputs": []}]))
    (abis / "Vault.json").write_text(json.dumps({"abi": [PAUSED, TRANSFER], "bytecode": "0x00"}))
    (abis / "broken.json").write_text('[\n  {"type": "event",}\n]')
    (abis / "empty.json").write_text("[]")
    (tmp_path / "outside.json").write_text(json.dumps([TRANSFER]))
    (abis / "link.json").symlink_to(tmp_path / "outside.json")
    (abis / "loop.json").symlink_to("loop.json")
    return abis.parent


def dag(config: str) -> bytes:
    return DAG.replace("CONFIG", config).encode()


def config_of(yaml: bytes) -> Any:
    return plain(read_tree(yaml)[0])["jobs"][1]["config"]


@pytest.mark.parametrize(
    "config",
    [
        "{ events: { abi: ./abis/Token.json }, blocks_per_file: 7 }",
        '{events: {"abi": "abis/Token.json"}, blocks_per_file: 7}',
        "\n      events:\n        abi: './abis/Token.json'   # the token's\n      blocks_per_file: 7",
    ],
)
def test_a_file_is_written_in_place_of_its_path(folder: Path, config: str) -> None:
    resolved = resolve_files(dag(config), folder)
    assert config_of(resolved.yaml) == {"events": {"abi": [TRANSFER_TEXT]}, "blocks_per_file": 7}
    # Nothing else is changed, not even a comment.
    assert resolved.yaml.count(b"\n") == dag(config).count(b"\n")
    assert resolved.yaml.startswith(dag(config)[:200])
    # What is deployed is whole: it needs no folder, and resolving it again changes nothing.
    assert check_dag(resolved.yaml) == []
    assert resolve_files(resolved.yaml, Path("/nowhere")).yaml == resolved.yaml
    assert check_dag(dag(config), folder=folder) == []


def test_several_files_and_other_events_stand_in_one_list(folder: Path) -> None:
    config = (
        "{events: [erc721_transfers, {abi: abis/Token.json}, {abi: abis/Vault.json}], addresses: [], x: [1]}"
    )
    resolved = resolve_files(dag(config), folder)
    assert config_of(resolved.yaml)["events"] == [
        "erc721_transfers",
        {"abi": [TRANSFER_TEXT]},
        {"abi": ["event Paused()", TRANSFER_TEXT]},
    ]
    # Places after what was written are those of the file.
    [problem] = check_dag(dag(config), folder=folder)
    assert (problem.line, problem.column, problem.field) == (
        LINE,
        dag(config).decode().splitlines()[LINE - 1].index("x: [1]") + 1,
        "jobs[1].config.x",
    )


def test_another_file_is_another_version_and_another_layout_of_it_is_not(folder: Path) -> None:
    given = dag("{events: {abi: abis/Token.json}}")
    before = resolve_files(given, folder).yaml
    (folder / "abis" / "Token.json").write_text(json.dumps([TRANSFER], indent=4))
    assert resolve_files(given, folder).yaml == before
    (folder / "abis" / "Token.json").write_text(json.dumps([TRANSFER, PAUSED]))
    assert resolve_files(given, folder).yaml != before


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("./abis/Nothing.json", "./abis/Nothing.json: can't be read: No such file or directory"),
        ("./abis/loop.json", "./abis/loop.json: can't be read: "),
        ("./abis", "./abis: can't be read: Is a directory"),
        ("../outside.json", "../outside.json: must be a file in the DAG's folder"),
        ("abis/link.json", "abis/link.json: must be a file in the DAG's folder"),
        ("./abis/broken.json", "./abis/broken.json: line 2, column 20: is not JSON"),
        ("./abis/empty.json", "./abis/empty.json: has no events"),
        ('"a\\0b"', "can't be read"),
        (">-\n          ./abis/Token.json", "must be the path of a file, on one line"),
        ("&anchor ./abis/Token.json", "must be the path of a file, on one line"),
    ],
)
def test_a_file_that_cannot_be_used_is_a_problem_of_the_line_that_names_it(
    folder: Path, path: str, told: str
) -> None:
    config = f"\n      events:\n        abi: {path}"
    [problem] = check_dag(dag(config), folder=folder)
    assert (problem.line, problem.field) == (LINE + 2, "jobs[1].config.events.abi")
    assert problem.column == 14
    assert told in problem.message


def test_an_absolute_path_and_a_file_that_is_too_large_are_refused(folder: Path) -> None:
    inside = folder / "abis" / "Token.json"
    [problem] = check_dag(dag(f"{{events: {{abi: {inside}}}}}"), folder=folder)
    assert "must be a file in the DAG's folder" in problem.message
    with inside.open("wb") as large:
        large.truncate(MAX_FILE + 1)
    [problem] = check_dag(dag("{events: {abi: abis/Token.json}}"), folder=folder)
    assert "is larger than 16777216 bytes" in problem.message


@pytest.mark.parametrize(
    "text", [b"abi: [", b"abi: 1", b"\xff abi", b"jobs: {abi: x}", b"jobs: [{config: abi}]"]
)
def test_what_is_no_dag_is_left_to_the_dispatcher(text: bytes, folder: Path) -> None:
    assert resolve_files(text, folder).yaml == text


def test_settings_of_other_operators_are_no_files(folder: Path) -> None:
    text = dag("{events: {abi: nothing.json}}").replace(b"decode_events", b"one_of_my_own")
    assert resolve_files(text, folder).yaml == text


def test_the_client_sends_the_whole_text_and_tells_places_of_the_file(folder: Path) -> None:
    sent: list[bytes] = []
    column = 400

    def dispatcher(request: httpx.Request) -> httpx.Response:
        sent.append(request.read())
        refusal = problem_of(InvalidDag([DagProblem(LINE, column, "jobs[1].config", "no")]))
        return httpx.Response(refusal.status, content=encode_problem(refusal))

    given = dag("{events: {abi: abis/Token.json}, addresses: []}")
    written = len(json.dumps([TRANSFER_TEXT])) - len("abis/Token.json")
    with Client("http://127.0.0.1:9", "token") as client:
        client._http = httpx.Client(base_url=client.url, transport=httpx.MockTransport(dispatcher))
        for send in (client.deploy, client.plan):
            with pytest.raises(InvalidDag) as refused:
                send(given, folder=folder)
            assert refused.value.problems == (DagProblem(LINE, column - written, "jobs[1].config", "no"),)
            with pytest.raises(InvalidDag):
                send(given)
    assert sent[0] == sent[2] == resolve_files(given, folder).yaml
    assert sent[1] == sent[3] == given
    [problem] = check_dag(given)
    assert "is a file, which the client reads" in problem.message


def test_deploy_reads_files_beside_the_dag_and_reports_them_as_compilers_do(folder: Path) -> None:
    (folder / "dag.yaml").write_bytes(dag("{events: [{abi: abis/Token.json}, {abi: abis/Gone.json}]}"))
    for command in ("deploy", "plan"):
        told = CliRunner().invoke(
            app, [command, str(folder / "dag.yaml"), "--url", "http://127.0.0.1:9", "--token", "x"]
        )
        assert told.exit_code == 2
        assert told.stderr.splitlines() == [
            f"{folder}/dag.yaml:{LINE}:53: jobs[1].config.events[1].abi: "
            "abis/Gone.json: can't be read: No such file or directory"
        ]
