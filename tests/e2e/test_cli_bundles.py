"""``tracelake bundle`` against a real stack: pushed, named in a DAG, listed, shown, and refused."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from tests.support.dev_stack import DevStack

pytestmark = pytest.mark.xdist_group("cli")

DAG = """
name: NAME
jobs:
  - { name: src, activation: source, runtime: dispatcher, source: { kind: manual }, outputs: 1 }
  - name: fn
    activation: reactive
    runtime: lambda
    udf: { bundle: "BUNDLE", entrypoint: main.handler }
    inputs: [{ from: { job: src, output: 0 } }]
    outputs: 1
    execution_strategy: PerPartition
"""


@pytest.fixture
def function(tmp_path: Path) -> Path:
    folder = tmp_path / "function"
    folder.mkdir()
    (folder / "main.py").write_text(f"def handler(event, context):\n    return '{uuid4()}'\n")
    return folder


def said(stack: DevStack, *arguments: str | Path) -> str:
    done = stack.run(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_pushed_folder_is_printed_as_the_reference_that_a_dag_names(
    stack: DevStack, function: Path, tmp_path: Path
) -> None:
    reference = said(stack, "bundle", "push", function).strip()
    assert reference.startswith("sha256:")
    assert len(reference) == 71
    again: Any = json.loads(said(stack, "bundle", "push", function, "--json"))
    assert (again["bundle"], again["created"]) == (reference, False)
    assert reference in said(stack, "bundle", "list")
    shown: Any = json.loads(said(stack, "bundle", "show", reference, "--json"))
    assert shown["names"] == ["main.py"]
    assert "main.py" in said(stack, "bundle", "show", reference)
    file = tmp_path / "dag.yaml"
    file.write_text(DAG.replace("NAME", f"d{uuid4().hex[:8]}").replace("BUNDLE", reference))
    assert "2 jobs active" in said(stack, "deploy", file)


def test_a_dag_with_a_bundle_that_was_never_pushed_is_refused_at_its_line(
    stack: DevStack, tmp_path: Path
) -> None:
    file = tmp_path / "dag.yaml"
    file.write_text(DAG.replace("NAME", "never").replace("BUNDLE", "sha256:" + "0" * 64))
    done = stack.run("deploy", file)
    assert done.returncode == 2
    assert done.stderr.startswith(f"{file}:8:12: jobs[1].udf.bundle: isn't known; push it first")


def test_what_cannot_be_a_bundle_is_refused_before_it_is_sent(
    stack: DevStack, function: Path, tmp_path: Path
) -> None:
    hostile = tmp_path / "hostile.zip"
    with zipfile.ZipFile(hostile, "w") as archive:
        archive.writestr("../evil.py", "")
    empty = tmp_path / "empty"
    empty.mkdir()
    (function / "passwd").symlink_to("/etc/passwd")
    for path, why in (
        (hostile, "leads out of the bundle"),
        (empty, "no file"),
        (function, "passwd is a link"),
    ):
        done = stack.run("bundle", "push", path)
        assert (done.returncode, done.stdout) == (1, "")
        assert why in done.stderr
    assert stack.run("bundle", "push", tmp_path / "nothing").returncode == 2
    unknown = stack.run("bundle", "show", "sha256:" + "0" * 64)
    assert (unknown.returncode, unknown.stderr.count("\n")) == (1, 1)


def test_a_bundle_that_is_too_large_is_refused_before_it_is_sent(stack: DevStack, tmp_path: Path) -> None:
    large = tmp_path / "large.zip"
    large.touch()
    os.truncate(large, 64 * 1024 * 1024 + 1)
    done = stack.run("bundle", "push", large)
    assert done.returncode == 1
    assert "more than 64 MiB" in done.stderr
