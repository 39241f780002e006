"""Become a Spark Connect server: ``python -m tracelake.worker.spark.launch``, started by the operator host.

It runs as the server will (same identity, same view of the files), finds a Java there, writes what the server
reads into a folder of its own, and then is replaced by the JVM. What it has to know comes through the socket that
its output goes to. Command lines are for everybody to read, environments for every process of the same user, and
for every query where Spark puts the values of variables into its text: so the token is in neither. Spark takes it
from a file, which the worker removes as soon as the server is up (``forget_secrets``).

The command line is the one that Spark's launcher would make, without starting a JVM to make it.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
from pathlib import Path

import msgspec

from tracelake.domain.errors import TracelakeError
from tracelake.worker.spark.conf import LOGGING, POOLS, as_properties
from tracelake.worker.spark.java import Java, find_java
from tracelake.worker.spark.settings import JavaSource

MISCONFIGURED = 78
SECRETS = "spark-defaults.conf"

_MAIN = "org.apache.spark.sql.connect.service.SparkConnectServer"
# What Spark 4.3 needs to get at inside of Java; without the module that a small Java doesn't have.
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
    # A server that ran out of memory would go on, broken; one that is gone is started anew.
    "-XX:+ExitOnOutOfMemoryError",
)


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    folder: str
    java: JavaSource
    java_options: tuple[str, ...]
    driver_memory: str
    conf: dict[str, str]
    secrets: dict[str, str]


def main() -> None:
    launch = msgspec.json.decode(_told(), type=Launch)
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
        # Asked for by the launcher of executors, which otherwise looks for a source tree.
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
        *launch.java_options,
        *("-cp", f"{spark_home / 'jars'}/*"),
        "org.apache.spark.deploy.SparkSubmit",
        *("--properties-file", str(conf / "spark.properties"), "--load-spark-defaults"),
        *("--class", _MAIN, "spark-internal"),
    ]


def forget_secrets(folder: Path) -> None:
    """Once the server is up. The folder is the server's own: no link in it leads anywhere else from here."""
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


def _scala_version(spark_home: Path) -> str:
    core = next(iter((spark_home / "jars").glob("spark-core_*.jar")), None)
    return core.name.removeprefix("spark-core_").partition("-")[0] if core is not None else ""


def _told() -> bytes:
    with socket.socket(fileno=os.dup(sys.stdout.fileno())) as channel, channel.makefile("rb") as told:
        return told.read()


def _prepare(folder: Path, launch: Launch) -> None:
    before = os.umask(0o077)
    for name in ("conf", "scratch", "warehouse"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    conf = folder / "conf"
    (conf / "log4j2.properties").write_text(LOGGING, encoding="utf-8")
    (conf / "pools.xml").write_text(POOLS, encoding="utf-8")
    (conf / "spark.properties").write_text(as_properties(launch.conf), encoding="utf-8")
    (conf / SECRETS).write_text(as_properties(launch.secrets), encoding="utf-8")
    # Not for what the server writes later: outputs are read by others.
    os.umask(before)


if __name__ == "__main__":
    main()
