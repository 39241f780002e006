"""The bill of materials names every locked package with all of its hashes, and what they bring along."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from scripts.bill_of_materials import LOCK, bill, main

HOSTS = re.compile("|".join(("pypi" + r"\.org", "pythonhosted" + r"\.org", "https?://")))


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    return bill(LOCK.read_text(encoding="utf-8"), now=datetime(2026, 1, 1, tzinfo=UTC))


def test_every_locked_package_is_named_with_all_of_its_hashes(made: dict[str, Any]) -> None:
    named = {each["name"]: each for each in made["components"] if each["purl"].startswith("pkg:pypi/")}
    lock = LOCK.read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line for line in lock.splitlines() if "==" in line and not line.lstrip().startswith("#")]
    assert len(lines) == len(named)
    for line in lines:
        name, _, rest = line.partition("==")
        component = named[re.sub(r"[-_.]+", "-", name).lower()]
        assert component["version"] == rest.split()[0]
        assert component["purl"] == f"pkg:pypi/{component['name']}@{component['version']}"
        digests = re.findall(r"sha256:([0-9a-f]{64})", line)
        assert [each["content"] for each in component["hashes"]] == digests
        assert digests


def test_it_has_what_the_specification_requires(made: dict[str, Any]) -> None:
    assert (made["bomFormat"], made["specVersion"], made["version"]) == ("CycloneDX", "1.6", 1)
    assert re.fullmatch(r"urn:uuid:[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", made["serialNumber"])
    references = [each["bom-ref"] for each in made["components"]]
    assert len(references) == len(set(references))
    kinds = {"application", "framework", "library", "platform"}
    scopes = {"required", "optional", "excluded", None}
    for each in made["components"]:
        assert each["type"] in kinds
        assert each["name"]
        assert each["version"]
        assert each.get("scope") in scopes
        for licence in each.get("licenses", ()):
            assert set(licence) in ({"expression"}, {"license"})
        for digest in each.get("hashes", ()):
            assert digest["alg"] == "SHA-256"
            assert re.fullmatch(r"[0-9a-f]{64}", digest["content"])
    every = {made["metadata"]["component"]["bom-ref"], *references}
    for edge in made["dependencies"]:
        assert {edge["ref"], *edge["dependsOn"]} <= every
    assert {edge["ref"] for edge in made["dependencies"]} == every


def test_what_packages_bring_along_is_named(made: dict[str, Any]) -> None:
    by_name = {each["name"]: each for each in made["components"]}
    assert by_name["postgresql"]["version"].startswith("18.")
    assert {"openjdk", "apache-spark", "hadoop-client-runtime"} <= set(by_name)
    assert by_name["httpx"]["scope"] == "required"
    assert by_name["duckdb"]["scope"] == "optional"
    assert by_name["pytest"]["scope"] == "excluded"


def test_it_says_of_most_packages_what_their_licence_is(made: dict[str, Any]) -> None:
    silent = [each["name"] for each in made["components"] if "scope" in each and "licenses" not in each]
    shipped = [each for each in made["components"] if each.get("scope") in ("required", "optional")]
    assert len([each["name"] for each in shipped if "licenses" not in each]) <= 2, silent
    assert len(silent) < 10, silent


def test_the_file_names_no_registry_and_is_the_same_each_time(tmp_path: Path) -> None:
    for name in ("one.json", "two.json"):
        main(tmp_path / name)
    one, two = (msgspec.json.decode((tmp_path / name).read_bytes()) for name in ("one.json", "two.json"))
    for each in (one, two):
        del each["metadata"]["timestamp"]
    assert one == two
    assert HOSTS.search((tmp_path / "one.json").read_text(encoding="utf-8")) is None
