"""Attacks by SQL: SELECTs of a DAG for ``sql_transform`` on Spark, and of any user for the Query Service on
DuckDB."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING

from tests.support import query_attacks
from tests.support.attack.attack import Verdict, all_of, attack, broken, held

if TYPE_CHECKING:
    from tests.support.attack.stack import AttackedStack

SQL_TRANSFORM = "what runs is what was judged"
SUBSTITUTION = "no substitution in SQL"
QUERIES = "a query is answered or refused, never broken"

# A relation called DIV and columns called JOIN and x: one parser reads a join, the other MAP … USING 'script'.
_Q = "WITH DIV AS (SELECT 1 AS x), q AS (SELECT block_number AS JOIN, 1 AS x FROM scope_blocks)"
SCRIPTS: Mapping[str, str] = {
    "map": f"{_Q} SELECT * FROM (FROM q MAP JOIN DIV x USING 'id; echo 1')",
    "map first": f"{_Q} FROM q MAP JOIN DIV x USING 'id'",
    "reduce": f"{_Q} SELECT * FROM (FROM q REDUCE JOIN DIV x USING 'id')",
    "select transform": "SELECT TRANSFORM(block_number) USING 'id' AS (block_number STRING) FROM scope_blocks",
    "comment": f"{_Q} SELECT * FROM (FROM q /**/ MAP /* */ JOIN DIV x /* */ USING /* */ 'id')",
    "twice": f"{_Q} SELECT * FROM (FROM q MAP JOIN DIV x USING 'id') JOIN (FROM q MAP JOIN DIV x USING 'id') ON true",
    "in a subquery": f"{_Q} SELECT block_number FROM scope_blocks WHERE block_number IN (FROM q MAP JOIN DIV x USING 'id')",
    "in a cte": f"{_Q}, s AS (FROM q MAP JOIN DIV x USING 'id') SELECT * FROM s",
}
CODE: Mapping[str, str] = {
    "reflect": "SELECT block_number, reflect('java.lang.System', 'getenv', 'PATH') AS p FROM scope_blocks",
    "java_method": "SELECT block_number, java_method('java.lang.Runtime', 'getRuntime') AS p FROM scope_blocks",
    "try_reflect": "SELECT block_number, try_reflect('java.lang.System', 'getenv', 'PATH') AS p FROM scope_blocks",
    "cte named as function": (
        "WITH reflect AS (SELECT 1 AS x) SELECT block_number, reflect('java.lang.System', 'getenv', 'PATH') AS p"
        " FROM scope_blocks"
    ),
    "quoted function": "SELECT block_number, `reflect`('java.lang.System', 'getenv', 'PATH') AS p FROM scope_blocks",
    "qualified function": (
        "SELECT block_number, system.builtin.reflect('java.lang.System', 'getenv', 'PATH') AS p FROM scope_blocks"
    ),
    "identifier clause": (
        "SELECT block_number, IDENTIFIER('reflect')('java.lang.System', 'getenv', 'PATH') AS p FROM scope_blocks"
    ),
    "lateral view": "SELECT block_number, c FROM scope_blocks LATERAL VIEW python_worker_logs() t AS c",
    "user function": "SELECT block_number, default.f(block_number) AS p FROM scope_blocks",
}
FILES: Mapping[str, str] = {
    "text": "SELECT 0 AS block_number, value FROM text.`/etc/passwd`",
    "parquet": "SELECT * FROM parquet.`@OBJECTS@`",
    "csv": "SELECT 0 AS block_number, _c0 FROM csv.`/etc/passwd`",
    "binary": "SELECT 0 AS block_number, content FROM binaryFile.`/etc/hostname`",
    "quoted name": "SELECT 0 AS block_number, value FROM `text`.`/etc/passwd`",
    "identifier": "SELECT 0 AS block_number, value FROM IDENTIFIER('text.`/etc/passwd`')",
    "table valued": "SELECT * FROM read_files('/etc/passwd')",
    "data source": "SELECT * FROM evm.`http://127.0.0.1:9`",
    "jdbc": "SELECT * FROM jdbc.`x`",
    "range": "SELECT id AS block_number FROM range(10)",
    "global views": "SELECT * FROM global_temp.anything",
    "catalog": "SELECT * FROM spark_catalog.default.anything",
    "cte of a path": "WITH text AS (SELECT 1 AS x) SELECT 0 AS block_number, value FROM text.`/etc/passwd`",
}
COMMANDS: Mapping[str, str] = {
    "two statements": "SELECT block_number FROM scope_blocks; SELECT 1",
    "set": "SET spark.sql.variable.substitute=true",
    "add jar": "ADD JAR '/tmp/x.jar'",
    "create function": "CREATE TEMPORARY FUNCTION f AS 'java.lang.String'",
    "create table": "CREATE TABLE t USING text LOCATION '/etc/passwd'",
    "insert": "INSERT OVERWRITE DIRECTORY '/tmp/x' USING text SELECT 'x'",
    "insert from": "FROM scope_blocks INSERT OVERWRITE DIRECTORY '/tmp/x' USING text SELECT 'x'",
    "explain": "EXPLAIN SELECT 1",
    "execute immediate": "EXECUTE IMMEDIATE 'SELECT 1'",
    "script": "BEGIN SELECT 1 AS block_number; END",
    "declare": "DECLARE x INT DEFAULT 1",
    "cache": "CACHE TABLE scope_blocks",
    "pipe": "FROM scope_blocks |> SELECT reflect('java.lang.System', 'getenv', 'PATH') AS p",
    "describe": "DESCRIBE scope_blocks",
    "show": "SHOW TABLES",
}
SUBSTITUTED: Mapping[str, str] = {
    "environment": "SELECT block_number, '${env:PATH}' AS t FROM scope_blocks",
    "token": "SELECT block_number, '${env:SPARK_CONNECT_AUTHENTICATE_TOKEN}' AS t FROM scope_blocks",
    "system": "SELECT block_number, '${system:java.version}' AS t FROM scope_blocks",
    "setting": "SELECT block_number, '${spark.master}' AS t FROM scope_blocks",
    "spark": "SELECT block_number, '${spark:spark.master}' AS t FROM scope_blocks",
    "sparkconf": "SELECT block_number, '${sparkconf:spark.master}' AS t FROM scope_blocks",
    "hive": "SELECT block_number, '${hiveconf:spark.master}' AS t FROM scope_blocks",
    "in a name": "SELECT block_number AS `${env:PATH}` FROM scope_blocks",
    "nested": "SELECT block_number, '${${env:HOME}env:PATH}' AS t FROM scope_blocks",
}
UNSTABLE: Mapping[str, str] = {
    "uuid": "WITH uuid AS (SELECT 1 AS x) SELECT block_number, uuid() AS u FROM scope_blocks",
    "rand": "WITH rand AS (SELECT 1 AS x) SELECT block_number, rand() AS u FROM scope_blocks",
    "now": "WITH now AS (SELECT 1 AS x) SELECT block_number, now() AS u FROM scope_blocks",
    "alias": "SELECT block_number, uuid() AS u FROM scope_blocks AS uuid",
    "without parentheses": "SELECT block_number, current_timestamp AS u FROM scope_blocks",
    "a typed literal": "SELECT block_number, TIMESTAMP 'now' AS u FROM scope_blocks",
    "a cast": "SELECT block_number, cast('today' AS date) AS u FROM scope_blocks",
    "user": "SELECT block_number, current_user() AS u FROM scope_blocks",
    "partition": "SELECT block_number, spark_partition_id() AS u FROM scope_blocks",
    "in a lambda": "SELECT block_number, transform(array(1), x -> rand()) AS u FROM scope_blocks",
    "in an order": "SELECT block_number FROM scope_blocks ORDER BY rand()",
    "sample": "SELECT block_number FROM scope_blocks TABLESAMPLE (50 PERCENT)",
}


def _refused_by_spark(stack: AttackedStack, queries: Mapping[str, str]) -> Verdict:
    texts = [sql.replace("@OBJECTS@", stack.handle.object_root) for sql in queries.values()]
    verdicts: list[tuple[str, Verdict]] = []
    for name, ran in zip(queries, stack.transform(*texts), strict=True):
        if isinstance(ran, str):
            verdicts.append((name, held(f"the DAG is refused: {ran[-60:]}")))
        elif ran.failed and not any(word in ran.why for word in ("Traceback", "timed out")):
            verdicts.append((name, held(ran.why[:60])))
        elif ran.failed:
            verdicts.append((name, broken(f"failed without a reason: {ran.why[:80]}")))
        else:
            shown = stack.query(f"SELECT * FROM {ran.task.dag_name} LIMIT 1").text
            verdicts.append((name, broken(f"published {shown[:160]}")))
    return all_of(verdicts)


@attack(
    "sql",
    SQL_TRANSFORM,
    "shell commands by a MAP … USING that one parser reads as a join",
    "the DAG is refused, or the task fails and says why; nothing is published",
    quick=True,
)
def sql_transform_runs_no_script(stack: AttackedStack) -> Verdict:
    return _refused_by_spark(stack, SCRIPTS)


@attack(
    "sql",
    SQL_TRANSFORM,
    "Java code by name: reflect, java_method, other spellings",
    "the task fails",
    quick=True,
)
def sql_transform_calls_no_code(stack: AttackedStack) -> Verdict:
    return _refused_by_spark(stack, CODE)


@attack("sql", SQL_TRANSFORM, "files, data sources and catalogs as relations", "refused with a reason")
def sql_transform_reads_no_file(stack: AttackedStack) -> Verdict:
    return _refused_by_spark(stack, FILES)


@attack("sql", SQL_TRANSFORM, "statements that aren't one SELECT", "refused with a reason")
def sql_transform_runs_no_command(stack: AttackedStack) -> Verdict:
    return _refused_by_spark(stack, COMMANDS)


@attack(
    "sql",
    SUBSTITUTION,
    "${env:…}, ${system:…} and settings in a string and in a name",
    "the text stays as it is, or the task fails; no value is published",
)
def sql_transform_substitutes_nothing(stack: AttackedStack) -> Verdict:
    verdicts: list[tuple[str, Verdict]] = []
    for (name, sql), ran in zip(SUBSTITUTED.items(), stack.transform(*SUBSTITUTED.values()), strict=True):
        if isinstance(ran, str) or (ran.failed and "timed out" not in ran.why):
            verdicts.append((name, held(f"refused: {(ran if isinstance(ran, str) else ran.why)[:60]}")))
            continue
        if ran.failed:
            verdicts.append((name, broken(ran.why)))
            continue
        shown = stack.query(f"SELECT * FROM {ran.task.dag_name} LIMIT 1").json()
        values = [*shown["columns"], *map(str, shown["rows"][0])]
        if any("${" in text and text in sql for text in values):
            verdicts.append((name, held("the text as it was written")))
        else:
            verdicts.append((name, broken(f"published {values}"[:160])))
    return all_of(verdicts)


@attack(
    "sql",
    SQL_TRANSFORM,
    "functions whose result changes from run to run, behind CTEs of their names",
    "the task fails",
)
def sql_transform_repeats_itself(stack: AttackedStack) -> Verdict:
    return _refused_by_spark(stack, UNSTABLE)


@attack("sql", QUERIES, "every query of the corpus of attacks", "4xx with a reason, no file's content")
def query_corpus_is_refused(stack: AttackedStack) -> Verdict:
    bad: list[str] = []
    count = 0
    for each in chain(query_attacks.refused_at_the_root(4), query_attacks.refused_in_disguise(every=100)):
        count += 1
        sql = each.rendered(file=str(stack.home / "secrets.json"), env="TRACELAKE_CATALOG_DSN")
        answer = stack.query(sql, params=list(each.params)) if each.params else stack.query(sql)
        if not 400 <= answer.status_code < 500 or not answer.json().get("reason"):
            bad.append(f"{answer.status_code} for {each.kind}: {sql[:80]}")
    return broken("; ".join(bad[:5])) if bad else held(f"{count} queries, each 4xx with a reason")


ODD_VALUES: Mapping[str, str] = {
    "least bigint on a hot table": "SELECT * FROM hot_ledger WHERE block_number = -9223372036854775808",
    "least bigint, twice": "SELECT * FROM hot_ledger WHERE amount >= -9223372036854775808 AND block_number < 3",
    "below bigint": "SELECT * FROM hot_ledger WHERE block_number > -9223372036854775809",
    "above bigint": "SELECT * FROM hot_ledger WHERE block_number < 9223372036854775808",
    "above hugeint": "SELECT * FROM hot_ledger WHERE block_number < 340282366920938463463374607431768211456",
    "decimal": "SELECT * FROM hot_ledger WHERE block_number < 1e308",
    "nan": "SELECT * FROM hot_ledger WHERE block_number < 'nan'::DOUBLE",
    "null byte": "SELECT * FROM hot_ledger WHERE block_number::VARCHAR = chr(0)",
    "between": "SELECT * FROM hot_ledger WHERE block_number BETWEEN -9223372036854775808 AND 9223372036854775807",
    "in": "SELECT * FROM hot_ledger WHERE block_number IN (-9223372036854775808, 1)",
    "hugeint": "SELECT 170141183460469231731687303715884105727::HUGEINT",
    "least hugeint": "SELECT -170141183460469231731687303715884105728::HUGEINT",
    "uhugeint": "SELECT 340282366920938463463374607431768211455::UHUGEINT",
    "sum of hugeints": "SELECT sum(x) FROM (VALUES (170141183460469231731687303715884105727::HUGEINT)) t(x)",
    "hugeint in a list": "SELECT [170141183460469231731687303715884105727::HUGEINT]",
    "hugeint in a struct": "SELECT {'x': 10::HUGEINT ** 38}",
    "end of the day": "SELECT time '24:00:00'",
    "end of the day, zoned": "SELECT timetz '24:00:00+00'",
    "end of the day in a list": "SELECT [time '24:00:00']",
    "infinite timestamp": "SELECT 'infinity'::TIMESTAMP",
    "infinite timestamptz": "SELECT '-infinity'::TIMESTAMPTZ",
    "infinite date": "SELECT 'infinity'::DATE",
    "infinite in a map": "SELECT MAP {'infinity'::TIMESTAMP: 'infinity'::DATE}",
    "largest date": "SELECT '5881580-07-10'::DATE",
    "before christ": "SELECT '290308-12-22 (BC) 00:00:00'::TIMESTAMP",
    "interval": "SELECT INTERVAL 2147483647 MONTH",
    "bit": "SELECT '0101'::BIT",
    "union": "SELECT union_value(x := 1)",
    "bignum": "SELECT 123456789012345678901234567890123456789012345678901234567890::BIGNUM",
    "nanoseconds": "SELECT '1677-09-21 00:12:44'::TIMESTAMP_NS",
    "null type": "SELECT NULL",
    "empty list": "SELECT []",
    "invalid text": "SELECT decode('\\xff'::BLOB)",
    "names twice": "SELECT 1 AS a, 2 AS a",
    "empty name": 'SELECT 1 AS ""',
}


@attack(
    "sql",
    QUERIES,
    "values at the ends of their types, in every place",
    "200, or 4xx with a reason",
    quick=True,
)
def query_values_are_answered(stack: AttackedStack) -> Verdict:
    return _answers(stack, ODD_VALUES, export=False)


@attack("sql", QUERIES, "the same as an export", "200, or 4xx with a reason")
def query_exports_are_answered(stack: AttackedStack) -> Verdict:
    return _answers(stack, ODD_VALUES, export=True)


def _answers(stack: AttackedStack, queries: Mapping[str, str], *, export: bool) -> Verdict:
    bad: list[str] = []
    for name, sql in queries.items():
        answer = stack.query(sql, **({"export": True} if export else {}))
        engine = "crashed the engine process" in answer.text
        if (
            answer.status_code >= 500
            or engine
            or (answer.status_code >= 400 and "reason" not in answer.json())
        ):
            bad.append(f"{name}: {answer.status_code} {answer.text[:120]}")
    return broken("; ".join(bad)) if bad else held("each is answered or refused with a reason")


@attack(
    "sql",
    "nobody fills the disk for others",
    "300 exports of one caller",
    "refused with a reason when the caller's quota is used up",
)
def query_exports_have_a_quota(stack: AttackedStack) -> Verdict:
    big = "SELECT repeat('x', 1000) || i::VARCHAR AS t FROM range(20000) r(i)"
    sizes = 0
    for number in range(300):
        answer = stack.query("SELECT 1" if number % 10 else big, export=True)
        if answer.status_code in (403, 409, 413, 422, 429) and "reason" in answer.json():
            if answer.json()["reason"] in ("QueryRefused", "InvalidQuery"):
                big = "SELECT 1"
                continue
            return held(f"export {number + 1}: {answer.status_code} {answer.json()['reason']}")
        if answer.status_code >= 500:
            return broken(f"export {number + 1}: {answer.status_code} {answer.text[:100]}")
        sizes += 1
    return broken(f"{sizes} exports of one caller are kept")
