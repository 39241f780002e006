"""The configuration of an embedded Spark Connect server: ours, then the user's, then what can't be changed."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tracelake.worker.spark.settings import TEXT_MEANS_WHAT_IT_SAYS, SparkSettings

LOOPBACK = "127.0.0.1"
ONLY_WHAT_IS_INSTALLED: Final = {"PYTHONSAFEPATH": "1", "PYTHONNOUSERSITE": "1"}
"""For Python in a folder that tasks write to: neither that folder nor its ``.local`` is where modules are found."""

_DEFAULTS: Final = {
    "spark.app.name": "tracelake",
    "spark.log.structuredLogging.enabled": "false",
    "spark.scheduler.mode": "FAIR",
    "spark.sql.catalogImplementation": "in-memory",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # A range of blocks is cut before it is fetched; see ``tracelake.evm.source``.
    "spark.sql.python.filterPushdown.enabled": "true",
    # Spark's own default is a format that other readers of Parquet no longer know.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.session.timeZone": "UTC",
    "spark.connect.progress.reportInterval": "500ms",
    # On one machine a connection ends with its process; one that is merely stopped must not lose its work.
    "spark.connect.grpc.keepAlive.enabled": "false",
    # Work that another kind of client has left is stopped after this long; what operators leave, the wrapper ends.
    "spark.connect.execute.manager.detachedTimeout": "60s",
    "spark.connect.execute.manager.maintenanceInterval": "10s",
    # A session may well be idle for hours while its operator waits for a chain; it is ended when the attempt is.
    "spark.connect.session.manager.defaultSessionTimeout": "24h",
}


def server_conf(settings: SparkSettings, folder: Path, python_path: str) -> dict[str, str]:
    conf = {
        **_DEFAULTS,
        "spark.executorEnv.PYTHONPATH": python_path,
        "spark.jars.ivy": str(folder / "ivy"),
        # A path as Hadoop has it: it would look for an escaped space by its escape.
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
        # Elsewhere it may not be installed; there it costs every Python worker a moment for its imports.
        conf.setdefault("spark.python.daemon.module", "tracelake.worker.spark.python_daemon")
        # Spark's internal ports take serialized objects: on this machine too they are for this server alone.
        conf |= {
            **{f"spark.executorEnv.{name}": value for name, value in ONLY_WHAT_IS_INSTALLED.items()},
            "spark.authenticate": "true",
            "spark.driver.bindAddress": LOOPBACK,
            "spark.driver.host": LOOPBACK,
        }
    return conf


def server_secrets(settings: SparkSettings, token: str) -> dict[str, str]:
    """What of the configuration only the server may know."""
    known = {"spark.connect.authenticate.token": token}
    if settings.master.startswith("local-cluster"):
        # Elsewhere than in one process Spark makes up no secret by itself.
        known["spark.authenticate.secret"] = secrets.token_urlsafe(32)
    return known


def as_properties(conf: Mapping[str, str]) -> str:
    """A Java properties file. Whatever is in a value stays in that value."""
    return "".join(f"{_escaped(key, also=' =:')}={_escaped(value)}\n" for key, value in sorted(conf.items()))


def _escaped(text: str, also: str = "") -> str:
    out = []
    for index, char in enumerate(text):
        if char in "\\#!" or char in also or (char == " " and index == 0):
            out.append("\\" + char)
        elif char.isascii() and char.isprintable():
            out.append(char)
        else:
            units = char.encode("utf-16-be")
            out.extend(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))
    return "".join(out)


# Jobs in one pool wait for each other unless the pool itself is fair.
POOLS = """\
<?xml version="1.0"?>
<allocations>
  <pool name="default"><schedulingMode>FAIR</schedulingMode><weight>1</weight><minShare>0</minShare></pool>
</allocations>
"""

# Warnings, and the one line that says that the server listens, and where. A call that failed is told to its
# caller, and needs no page here.
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
