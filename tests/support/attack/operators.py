"""Attacks by operators, which are trusted with their inputs, staging places and the network, but not with the
platform or other DAGs.
"""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Set
from typing import TYPE_CHECKING, Any

import psycopg

from tests.support.attack.attack import Verdict, all_of, attack, broken, held
from tests.support.attack.stack import BUFFER, COLD, HOT, Ran

if TYPE_CHECKING:
    from tests.support.attack.stack import AttackedStack

STAGING = "the commit runs no code of an operator's"
PASSWORDS = "no login can change itself"
COMMITTED = "committed files belong to the platform"
PATHS = "a caller's path leads where it was allowed to"
PROCESSES = "no process carries one DAG's code into another's"
PLATFORM = "operators are kept from the platform"
TOKENS = "a token is good for its own attempt"
CACHES = "cache keys are things that we computed"

PG_OUTPUT = [{"name": "out", "storage": "postgres"}]
FILE_OUTPUT = [{"name": "out", "storage": "parquet"}]

# Every login that can be found in the process tries each statement; nothing that it does is kept.
EACH_LOGIN = """
import psycopg, pyarrow as pa
if ctx.config.get("stage"):
    ctx.outputs[0].stage(pa.table({"block_number": pa.array(list(ctx.blocks), pa.int64())}))
found = logins()
report(logins=len(found))
for dsn in found:
    for name, statement in ctx.config["statements"].items():
        try:
            with psycopg.connect(dsn, connect_timeout=10) as connection:
                user = connection.execute("SELECT current_user").fetchone()[0]
                try:
                    for each in statement.split(";;"):
                        connection.execute(each)
                    report(name=name, user=user, reached=statement[:100])
                except psycopg.Error as error:
                    report(name=name, user=user, refused=str(error)[:150])
                connection.rollback()
        except psycopg.OperationalError as error:
            report(name=name, user="?", refused=str(error)[:150])
"""


def _no_login_may(stack: AttackedStack, statements: dict[str, str], *, but_its_own: bool = False) -> Verdict:
    """``but_its_own``: a login that no other attempt has may do as it likes with itself."""
    config = {"statements": statements, "stage": True}
    ran = stack.operate(EACH_LOGIN, outputs=PG_OUTPUT, config=config)
    if not ran.report("logins"):
        return held("an operator holds no login to a database")
    own: set[str] = set()
    if but_its_own:
        other = stack.operate(
            EACH_LOGIN, outputs=PG_OUTPUT, config={**config, "statements": {"look": "SELECT 1"}}
        )
        own = _users(ran) - _users(other)
    return _none_reached(ran, own)


def _users(ran: Ran) -> set[str]:
    return {each["user"] for each in ran.reports if "user" in each}


def _none_reached(ran: Ran, own: Set[str] = frozenset()) -> Verdict:
    reached = [
        f"{each.get('user', '')} {each['name']}"
        for each in ran.reports
        if "reached" in each and each.get("user") not in own
    ]
    if own and not reached:
        return held("its login is its attempt's own; permission denied beyond it")
    refused = [each["refused"].splitlines()[0] for each in ran.reports if "refused" in each]
    if reached:
        return broken(f"reached: {', '.join(reached)}"[:600])
    if not refused:
        return broken(f"nothing was tried: {ran.task.status} {ran.why} {ran.log[-300:]}")
    return held("; ".join(dict.fromkeys(refused))[:300])


@attack(
    "operator",
    PASSWORDS,
    "ALTER ROLE CURRENT_USER PASSWORD by each login in the process",
    "permission denied; or the login is this attempt's alone",
    quick=True,
)
def no_login_alters_itself(stack: AttackedStack) -> Verdict:
    return _no_login_may(
        stack,
        {
            "password": "ALTER ROLE CURRENT_USER PASSWORD 'stolen'",
            "no password": "ALTER ROLE CURRENT_USER PASSWORD NULL",
        },
        but_its_own=True,
    )


@attack(
    "operator",
    PASSWORDS,
    "SET ROLE and GRANT to roles that may more; new roles",
    "permission denied, for every login that an operator gets",
    quick=True,
)
def no_login_becomes_another(stack: AttackedStack) -> Verdict:
    return _no_login_may(
        stack,
        {
            "by SET ROLE": "SET ROLE tracelake_writer",
            "owner": "SET ROLE tracelake_owner",
            "to superuser": "SET SESSION AUTHORIZATION postgres",
            "rename": "ALTER ROLE CURRENT_USER RENAME TO stolen",
            "create role": "CREATE ROLE stolen LOGIN",
            "grant": "GRANT tracelake_writer TO CURRENT_USER",
        },
    )


@attack(
    "operator",
    PASSWORDS,
    "ALTER ROLE CURRENT_USER SET search_path, row_security, session_preload_libraries",
    "refused, or without effect on other attempts",
)
def no_login_keeps_settings(stack: AttackedStack) -> Verdict:
    return _no_login_may(
        stack,
        {
            "search_path": "ALTER ROLE CURRENT_USER SET search_path = staging",
            "read only": "ALTER ROLE CURRENT_USER SET default_transaction_read_only = off",
            "timeouts": "ALTER ROLE CURRENT_USER SET statement_timeout = 1",
            "in the database": "ALTER ROLE CURRENT_USER IN DATABASE tracelake_data SET statement_timeout = 1",
        },
        but_its_own=True,
    )


@attack(
    "operator",
    PASSWORDS,
    "the logins of an attempt that has ended, also after it has changed their passwords and left a session open",
    "no login any more",
    quick=True,
)
def a_login_ends_with_its_attempt(stack: AttackedStack) -> Verdict:
    code = """
    import psycopg
    for dsn in logins():
        # Turned around: the worker takes passwords out of the log.
        report(dsn=dsn[::-1].encode().hex())
    """
    ran = stack.operate(code, outputs=PG_OUTPUT)
    dsns = [bytes.fromhex(each["dsn"]).decode()[::-1] for each in ran.reports if "dsn" in each]
    if not dsns:
        return held("an operator holds no login to a database")
    good: list[str] = []
    for dsn in dsns:
        try:
            with psycopg.connect(dsn, connect_timeout=10) as connection:
                row = connection.execute("SELECT current_user").fetchone()
                good.append(str(row[0]) if row else dsn)
        except psycopg.OperationalError as error:
            refusal = str(error).strip().splitlines()[-1]
    return broken(f"still good: {', '.join(good)}") if good else held(refusal[-120:])


@attack(
    "operator",
    STAGING,
    "tables, functions, views, types, casts, operators, triggers, policies, languages by each login",
    "permission denied: an operator can create nothing that a commit would run",
    quick=True,
)
def no_login_creates_anything(stack: AttackedStack) -> Verdict:
    function = "CREATE FUNCTION {}.f() RETURNS int LANGUAGE {} AS 'SELECT 1'"
    return _no_login_may(
        stack,
        {
            "schema": "CREATE SCHEMA hostile",
            "table in staging": "CREATE TABLE staging.hostile (x int)",
            "table in data": "CREATE TABLE data.hostile (x int)",
            "table in public": "CREATE TABLE public.hostile (x int)",
            "function in staging": function.format("staging", "sql"),
            "function in data": function.format("data", "sql"),
            "function in pg_temp": function.format("pg_temp", "sql"),
            "do": "DO $$ BEGIN PERFORM 1; END $$",
            "plpgsql": "CREATE FUNCTION staging.g() RETURNS int LANGUAGE plpgsql AS 'BEGIN RETURN 1; END'",
            "c": "CREATE FUNCTION staging.c() RETURNS int LANGUAGE c AS '/tmp/x.so', 'x'",
            "view": "CREATE VIEW staging.v AS SELECT 1",
            "type": "CREATE TYPE staging.t AS (x int)",
            "domain": "CREATE DOMAIN staging.d AS int",
            "sequence": "CREATE SEQUENCE staging.s",
            "event trigger": "CREATE EVENT TRIGGER e ON ddl_command_end EXECUTE FUNCTION pg_catalog.now()",
            "extension": "CREATE EXTENSION file_fdw",
            "foreign server": "CREATE SERVER s FOREIGN DATA WRAPPER postgres_fdw",
            "large object": "SELECT lo_create(0)",
            "copy program": "COPY (SELECT 1) TO PROGRAM 'id'",
            "copy file": "COPY (SELECT 1) TO '/tmp/tracelake-attack'",
            "read file": "SELECT pg_read_file('/etc/passwd')",
            "publication": "CREATE PUBLICATION p FOR ALL TABLES",
            "language": "CREATE TRUSTED LANGUAGE hostile HANDLER plpgsql_call_handler",
            "temporary table": "CREATE TEMPORARY TABLE hostile (x int)",
        },
    )


@attack(
    "operator",
    STAGING,
    "reads and writes of hot rows, the commits' own tables and other attempts' staging by each login",
    "permission denied, but for what was committed and its own rows",
    quick=True,
)
def no_login_writes_hot_rows(stack: AttackedStack) -> Verdict:
    table = f"data.d_{stack.client.dataset(HOT).dataset_version.hex}"
    verdict = _no_login_may(
        stack,
        {
            "update": f"UPDATE {table} SET amount = 99",
            "delete": f"DELETE FROM {table}",
            "truncate": f"TRUNCATE {table}",
            "insert": f"INSERT INTO {table} SELECT * FROM {table}",
            "writable session": f"SET default_transaction_read_only = off;; UPDATE {table} SET amount = 99",
            "writable transaction": f"SET TRANSACTION READ WRITE;; DELETE FROM {table}",
            "lock": f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE",
            "alter": f"ALTER TABLE {table} ADD COLUMN hostile int",
            "trigger": f"CREATE TRIGGER t BEFORE INSERT ON {table} EXECUTE FUNCTION suppress_redundant_updates_trigger()",
            "fences": "SELECT * FROM tracelake.fence",
            "outbox": "SELECT * FROM tracelake.outbox",
            "passwords": "SELECT * FROM pg_authid",
            "terminate others": "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename <> current_user",
            "settings": "ALTER SYSTEM SET log_statement = 'all'",
            "reload": "SELECT pg_reload_conf()",
            "checkpoint": "CHECKPOINT",
        },
    )
    changed = stack.unharmed()
    return broken(changed) if changed else verdict


# What a commit would run if the staging table could be made to carry code.
PLANTED = {
    "policy": """CREATE POLICY p ON {table} USING (staging.steal());;
                 ALTER TABLE {table} ENABLE ROW LEVEL SECURITY;; ALTER TABLE {table} FORCE ROW LEVEL SECURITY""",
    "trigger": "CREATE TRIGGER t BEFORE DELETE OR UPDATE ON {table} FOR EACH ROW EXECUTE FUNCTION staging.steal_row()",
    "rule": "CREATE RULE r AS ON DELETE TO {table} DO ALSO SELECT staging.steal()",
    "default": "ALTER TABLE {table} ALTER COLUMN block_number SET DEFAULT staging.steal()::int",
    "generated": "ALTER TABLE {table} ADD COLUMN g bool GENERATED ALWAYS AS (staging.steal()) STORED",
    "check": "ALTER TABLE {table} ADD CHECK (staging.steal())",
    "view": "ALTER TABLE {table} RENAME TO hidden;; CREATE VIEW {table} AS SELECT 1::bigint AS block_number",
    "inheritance": "CREATE TABLE staging.child (x int) INHERITS ({table})",
    "type": "ALTER TABLE {table} ALTER COLUMN block_number TYPE staging.evil USING 1",
    "index": "CREATE INDEX ON {table} ((staging.steal()))",
    "owner": "ALTER TABLE {table} OWNER TO CURRENT_USER",
    "drop": "DROP TABLE {table}",
}
PLANT = """
import psycopg, pyarrow as pa
ctx.outputs[0].stage(pa.table({"block_number": pa.array(list(ctx.blocks), pa.int64())}))
steal = '''CREATE FUNCTION staging.steal() RETURNS bool LANGUAGE plpgsql IMMUTABLE AS $f$
    BEGIN EXECUTE 'UPDATE @TABLE@ SET amount = 99'; RETURN true;
    EXCEPTION WHEN OTHERS THEN RETURN true; END $f$'''
steal_row = '''CREATE FUNCTION staging.steal_row() RETURNS trigger LANGUAGE plpgsql AS $f$
    BEGIN PERFORM staging.steal(); RETURN OLD; END $f$'''
for dsn in logins():
    with psycopg.connect(dsn, autocommit=True, connect_timeout=10) as connection:
        mine = [row[0] for row in connection.execute(
            "SELECT relname FROM pg_class WHERE relnamespace = to_regnamespace('staging') AND relkind = 'r'")]
        report(tables=mine)
        for name in mine or ["hostile"]:
            if ctx.task.task_id.hex not in name and str(ctx.task.task_id) not in name and len(mine) > 1:
                continue
            for each in (steal, steal_row, *ctx.config["plant"].split(";;")):
                each = each.replace("{table}", 'staging."' + name + '"')
                attempt("plant", lambda: connection.execute(each).statusmessage)
"""


@attack(
    "operator",
    STAGING,
    "policies, triggers, rules, defaults, generated columns, checks, views, indexes on its staging table, then the commit",
    "permission denied, and hot rows of others are as they were",
    quick=True,
)
def a_staging_table_carries_no_code(stack: AttackedStack) -> Verdict:
    table = f"data.d_{stack.client.dataset(HOT).dataset_version.hex}"
    verdicts: list[tuple[str, Verdict]] = []
    dags = {
        name: stack.start_operator(
            PLANT.replace("@TABLE@", table), outputs=PG_OUTPUT, config={"plant": plant}
        )
        for name, plant in PLANTED.items()
    }
    for name, dag in dags.items():
        ran = stack.ended(dag)
        if not any("tables" in each for each in ran.reports):
            verdicts.append((name, held("no login to plant anything with")))
        else:
            verdicts.append((name, _none_reached(ran)))
    changed = stack.unharmed()
    if changed:
        return broken(f"the commit ran the operator's function as the writer: {changed}")
    return all_of(verdicts)


@attack(
    "operator",
    COMMITTED,
    "another DAG's committed file: overwrite, truncate, replace, remove, change its mode, link to it",
    "permission denied or not there; the published sum is as it was",
    quick=True,
)
def committed_files_stay(stack: AttackedStack) -> Verdict:
    code = """
    import os, pyarrow as pa, pyarrow.parquet as pq
    path = ctx.config["path"]
    def overwrite():
        with open(path, "r+b") as file:
            file.write(b"hostile")
    def rewrite():
        pq.write_table(pa.table({"block_number": [1], "amount": [10**6]}), path)
    def replace():
        other = path + ".new"
        pq.write_table(pa.table({"block_number": [1], "amount": [10**6]}), other)
        os.replace(other, path)
    def neighbour():
        open(os.path.join(os.path.dirname(path), "beside"), "w").close()
    def linked():
        place = os.path.join(ctx.config["objects"], "linked")
        os.link(path, place)
    attempt("append", lambda: open(path, "ab").close())
    attempt("truncate", lambda: os.truncate(path, 10))
    attempt("mode", lambda: os.chmod(path, 0o666))
    attempt("beside", neighbour)
    attempt("link", linked)
    attempt("remove the folder", lambda: os.rename(os.path.dirname(path), os.path.dirname(path) + "x"))
    attempt("replace", replace)
    attempt("rewrite", rewrite)
    attempt("remove", lambda: os.unlink(path))
    """
    # A dataset for this attack alone: what it breaks, the others needn't know.
    name = stack.name("own")
    write = "import pyarrow as pa\nctx.outputs[0].write(pa.table({'block_number': [0, 1], 'amount': [1, 2]}))"
    publish = {name: {"from": {"job": "work", "output": 0}}}
    made = stack.operate(write, outputs=FILE_OUTPUT, publish=publish)
    if made.failed:
        return broken(f"no file to attack: {made.why}")
    path = stack.file_of(name)
    config = {"path": str(path), "objects": stack.handle.object_root}
    python = stack.operate(code, config=config)
    spark = stack.operate(code, config=config, runtime="ecs_spark")
    answer = stack.query(f"SELECT sum(amount)::INT FROM {name}")
    if answer.status_code != 200 or answer.json()["rows"] != [[3]]:
        return broken(f"the published sum is {answer.text[:120]}, not 3")
    return all_of([("ecs_python", _none_reached(python)), ("ecs_spark", _none_reached(spark))])


@attack(
    "operator",
    COMMITTED,
    "through Spark's executors: overwrite another DAG's file, read one that is no input",
    "refused; the published sum is as it was",
)
def spark_writes_no_committed_file(stack: AttackedStack) -> Verdict:
    code = """
    path = ctx.config["path"]
    spark = ctx.spark
    frame = spark.createDataFrame([(1, 10**6)], "block_number long, amount long")
    attempt("overwrite", lambda: frame.coalesce(1).write.mode("overwrite").parquet(path.rsplit("/", 1)[0]))
    def task(rows):
        with open(path, "r+b") as file:
            file.write(b"hostile")
        return iter([1])
    attempt("executor", lambda: frame.rdd if False else frame.mapInArrow(
        lambda batches: (task(batches), iter(batches))[1], frame.schema).collect())
    """
    path = stack.file_of(COLD)
    before = path.read_bytes()
    ran = stack.operate(code, runtime="ecs_spark", config={"path": str(path)})
    if not path.exists() or path.read_bytes() != before:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(before)
        return broken("the committed file has changed")
    return _none_reached(ran)


@attack(
    "operator",
    PLATFORM,
    "objects of other DAGs: committed files that aren't its inputs, bundles, exports, other tasks' staging",
    "not there",
    quick=True,
)
def other_objects_are_out_of_sight(stack: AttackedStack) -> Verdict:
    stack.query(f"SELECT * FROM {COLD}", export=True)
    exports = [path for path in stack.home.rglob("*.parquet") if "exports" in path.parts]
    code = """
    import os
    own = str(ctx.task.task_id)
    def look():
        seen = []
        for folder, _, names in os.walk(ctx.config["objects"]):
            for name in names:
                path = os.path.join(folder, name)
                if own not in path:
                    try:
                        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
                            file.read(1)
                        seen.append(path)
                    except OSError:
                        pass
        return seen
    report(seen=look()[:3])
    for name, path in ctx.config["paths"].items():
        attempt(name, lambda: open(path, "rb").read(4))
    """
    paths = {"file": str(stack.file_of(COLD))}
    if exports:
        paths["export"] = str(exports[0])
    config = {"objects": stack.handle.object_root, "paths": paths}
    verdicts = []
    for runtime in ("ecs_python", "ecs_spark"):
        ran = stack.operate(code, config=config, runtime=runtime)
        seen = ran.report("seen")
        verdict = broken(f"reads {seen}") if seen else _none_reached(ran)
        verdicts.append((runtime, verdict))
    return all_of(verdicts)


RACE = """
import ctypes, json, os, subprocess, sys, urllib.request, urllib.error
libc = ctypes.CDLL(None, use_errno=True)
# Where the token says that it may write: its own staging and scratch folders.
import base64
claims = os.environ["TRACE_TASK_CAPABILITY_TOKEN"].split(".")[1]
claims = json.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))
roots = [each.removeprefix("file://") for each in (*claims["s3"]["write"], *claims["s3"]["scratch"])]
report(roots=roots)
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
def publish(uri):
    body = {"task_id": os.environ["TRACE_TASK_ID"], "attempt": int(os.environ["TRACE_ATTEMPT"]),
            "lease_token": os.environ["TRACE_LEASE_TOKEN"], "dataset": ctx.config["buffer"], "batch_uri": uri}
    request = urllib.request.Request(os.environ["TRACE_DISPATCHER_URL"] + "/v1/task/buffer-publish",
        json.dumps(body).encode(), {"Content-Type": "application/json",
        "X-Trace-Task-Capability": os.environ["TRACE_TASK_CAPABILITY_TOKEN"]})
    try:
        with opener.open(request, timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refused:
        return refused.code, refused.read().decode()[:200]
    except OSError as error:
        return 0, repr(error)
root = None
for each in roots:
    try:
        os.makedirs(each, exist_ok=True)
        with open(os.path.join(each, "probe"), "w") as file:
            file.write("[]")
        root = each
        break
    except OSError as error:
        report(no_root=f"{each}: {error}")
target = ctx.config["target"]
"""


def _publishing(stack: AttackedStack, code: str, target: str, **config: Any) -> Ran:
    name = stack.name("stolen")
    schema = {"columns": {"org_id": "uuid", "key": "text", "note": "text"}, "unique": ["org_id", "key"]}
    publish = {name: {"storage": "postgres", "write_mode": "buffered", "schema": schema}}
    return stack.operate(
        RACE + textwrap.dedent(code),
        outputs=FILE_OUTPUT,
        publish=publish,
        config={"buffer": name, "target": target, **config},
    )


def _secret_records(stack: AttackedStack) -> str:
    """A file that only the Dispatcher's user can read, in the shape of a batch."""
    folder = stack.home.parent / "attack-secret"
    folder.mkdir(mode=0o700, exist_ok=True)
    file = folder / "batch"
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as opened:
        json.dump([{"key": "stolen", "note": "the content of a private file"}], opened)
    return str(file)


@attack(
    "operator",
    PATHS,
    "batch_uri through links in its staging folder: of the file, of a folder, hard, absolute, to /proc, a FIFO, a device",
    "4xx with a reason; nothing is published, nobody waits",
    quick=True,
)
def links_in_staging_lead_nowhere(stack: AttackedStack) -> Verdict:
    code = """
    if root is not None:
        def place(name):
            path = os.path.join(root, name)
            try:
                os.unlink(path)
            except OSError:
                pass
            return path
        def tried(name, make, suffix=""):
            path = place(name)
            try:
                make(path)
            except OSError as error:
                report(name=name, refused=str(error))
                return
            status, text = publish("file://" + path + suffix)
            report(name=name, **({"reached": text} if status in (0, 200, 500, 503) else {"refused": f"{status} {text}"}))
        tried("link", lambda path: os.symlink(target, path))
        tried("relative link", lambda path: os.symlink(os.path.relpath(target, root), path))
        tried("folder link", lambda path: os.symlink(os.path.dirname(target), path), "/batch")
        tried("root link", lambda path: os.symlink("/", path), target)
        tried("magic link", lambda path: os.symlink("/proc/self/root" + target, path))
        tried("hard link", lambda path: os.link(target, path))
        tried("fifo", lambda path: os.mkfifo(path))
        tried("folder", lambda path: os.mkdir(path))
        tried("device", lambda path: os.symlink("/dev/zero", path))
        tried("socket", lambda path: __import__("socket").socket(1).bind(path[-100:]))
        for name, uri in (("dots", root.rstrip("/") + "/../" * 12 + target), ("encoded", root.rstrip("/") + "/%2e%2e/x"),
                          ("other", target), ("double slash", root.rstrip("/") + "//x"), ("host", "localhost" + target),
                          ("null", root.rstrip("/") + "/x\\0y")):
            status, text = publish("file://" + uri)
            report(name=name, **({"reached": text} if status in (0, 200, 500, 503) else {"refused": f"{status} {text}"}))
    """
    ran = _publishing(stack, code, _secret_records(stack))
    if not any("refused" in each or "reached" in each for each in ran.reports):
        return held(f"an operator can't write where its token points: {ran.reports[:2]}"[:200])
    return _none_reached(ran)


@attack(
    "operator",
    PATHS,
    "a folder swapped for a link (RENAME_EXCHANGE) while the Dispatcher opens batch_uri, for several seconds",
    "4xx or the caller's own file, never the private one",
)
def a_swapped_folder_leads_nowhere(stack: AttackedStack) -> Verdict:
    code = """
    import time
    if root is not None:
        own, link = os.path.join(root, "own"), os.path.join(root, "link")
        os.makedirs(own, exist_ok=True)
        with open(os.path.join(own, "batch"), "w") as file:
            file.write(json.dumps([{"key": "own", "note": "own"}]))
        os.symlink(os.path.dirname(target), link)
        child = os.fork()
        if child == 0:
            a, b = own.encode(), link.encode()
            while os.getppid() != 1:
                libc.renameat2(-100, a, -100, b, 2)
            os._exit(0)
        stolen, tries = 0, 0
        until = time.monotonic() + ctx.config["seconds"]
        try:
            while time.monotonic() < until:
                status, text = publish("file://" + own + "/batch")
                tries += 1
                if status == 0:
                    report(name="hang", reached=text)
                    break
        finally:
            os.kill(child, 9)
            os.waitpid(child, 0)
        report(name="race", tries=tries, refused="see the table")
    """
    target = _secret_records(stack)
    ran = _publishing(stack, code, target, seconds=6)
    name = ran.task.dag_name
    if not any("tries" in each for each in ran.reports):
        return held(f"an operator can't write where its token points: {ran.reports[:2]}"[:200])
    [buffer] = [
        each.dataset
        for each in stack.client.datasets(dag=name).datasets
        if each.dataset and "stolen" in each.dataset
    ]
    return _not_stolen(stack, buffer, ran.report("tries"))


def _not_stolen(stack: AttackedStack, buffer: str, tries: int) -> Verdict:
    from tests.support.dev_stack import eventually

    eventually("the sink has written", lambda: stack.client.buffer(buffer).waiting == 0)
    answer = stack.query(f"SELECT count(*) FROM {buffer} WHERE key = 'stolen'")
    if answer.status_code == 200 and answer.json()["rows"] != [[0]]:
        return broken("the content of a private file is in a published dataset")
    return held(f"{tries} tries: none read the private file")


@attack(
    "operator",
    PATHS,
    "manifests that name others' files, links, paths with dots, a FIFO, the home's own files",
    "the completion is refused with a reason; nothing is published",
    quick=True,
)
def manifests_name_own_files_only(stack: AttackedStack) -> Verdict:
    code = """
    import hashlib, os, msgspec, pyarrow as pa
    from tracelake.contracts.manifest import Manifest
    output = ctx.outputs[0]
    manifest = output.write(pa.table({"block_number": list(ctx.blocks)}))
    path = manifest.files[0].location.removeprefix("file://")
    kind, target = ctx.config["kind"], ctx.config["target"]
    def changed(**fields):
        file = msgspec.structs.replace(manifest.files[0], **fields)
        return msgspec.structs.replace(manifest, files=(file,))
    link = path + ".link"
    if kind == "other":
        new = changed(location="file://" + target)
    elif kind == "dots":
        new = changed(location="file://" + os.path.dirname(path) + "/../../../../../../../../../.." + target)
    elif kind == "link":
        os.symlink(target, link)
        new = changed(location="file://" + link)
    elif kind == "folder link":
        os.symlink(os.path.dirname(target), link)
        new = changed(location="file://" + link + "/" + os.path.basename(target))
    elif kind == "hard link":
        os.link(target, link)
        new = changed(location="file://" + link)
    elif kind == "fifo":
        os.unlink(path)
        os.mkfifo(path)
        new = manifest
    elif kind == "scheme":
        new = changed(location=path)
    elif kind == "twice":
        new = msgspec.structs.replace(manifest, files=manifest.files * 2)
    elif kind == "rows":
        new = changed(rows=5)
    elif kind == "hash":
        new = changed(content_hash="sha256:" + "0" * 64)
    elif kind == "bytes":
        new = changed(bytes=5)
    elif kind == "changed after":
        with open(path, "ab") as file:
            file.write(b"more")
        new = manifest
    written = output._written[-1]
    output._written[-1] = msgspec.structs.replace(written, manifest=new)
    report(kind=kind)
    """
    kinds = (
        "other",
        "dots",
        "link",
        "folder link",
        "hard link",
        "fifo",
        "scheme",
        "twice",
        "bytes",
        "changed after",
    )
    target = str(stack.file_of(COLD))
    started: dict[str, tuple[str, str]] = {}
    for kind in kinds:
        name = stack.name("claimed")
        publish = {name: {"from": {"job": "work", "output": 0}}}
        config = {"kind": kind, "target": target}
        dag = stack.start_operator(
            code, outputs=FILE_OUTPUT, publish=publish, config=config, timeout_seconds=30
        )
        started[kind] = (dag, name)
    verdicts: list[tuple[str, Verdict]] = []
    for kind, (dag, name) in started.items():
        ran = stack.ended(dag)
        if ran.failed:
            verdicts.append((kind, held(ran.why.splitlines()[0][:80])))
        elif kind == "scheme" and stack.query(f"SELECT * FROM {name}").status_code == 200:
            verdicts.append((kind, held("another spelling of its own file")))
        else:
            verdicts.append(
                (kind, broken(f"published {stack.query(f'SELECT * FROM {name} LIMIT 1').text[:80]}"))
            )
    return all_of(verdicts)


@attack(
    "operator",
    CACHES,
    "a manifest that claims the schema hash of another dataset, queried before and after",
    "each dataset shows its own columns",
    quick=True,
)
def a_claimed_schema_hash_changes_nothing(stack: AttackedStack) -> Verdict:
    code = """
    import msgspec, pyarrow as pa
    output = ctx.outputs[0]
    manifest = output.write(pa.table({"block_number": [0], **{name: [1] for name in ctx.config["columns"]}}))
    written = output._written[-1]
    forged = msgspec.structs.replace(manifest, schema_hash="sha256:" + ctx.config["hash"])
    output._written[-1] = msgspec.structs.replace(written, manifest=forged)
    """
    digest = os.urandom(32).hex()
    names = {}
    for columns in (["alpha"], ["beta", "gamma"]):
        name = stack.name("forged")
        publish = {name: {"from": {"job": "work", "output": 0}}}
        ran = stack.operate(
            code, outputs=FILE_OUTPUT, publish=publish, config={"columns": columns, "hash": digest}
        )
        if ran.failed:
            return held(f"the completion is refused: {ran.why[:100]}")
        names[name] = ["block_number", *columns]
        answer = stack.query(f"SELECT * FROM {name}")
        if answer.status_code != 200 or answer.json()["columns"] != names[name]:
            return broken(f"{name} has {names[name]}, and the answer is {answer.text[:160]}")
    return held("each dataset shows its own columns")


PATCH = """
import os, sys
from tracelake.operators import context, registry
from tracelake.worker.operator import main
kept = []
original = context.Context.__init__
def patched(self, *given, **named):
    kept.append(dict(os.environ))
    return original(self, *given, **named)
patched.hostile = ctx.config["tag"]
patched.kept = kept
context.Context.__init__ = patched
sys.modules["hostile_mark"] = type(sys)("hostile_mark")
sys.modules["hostile_mark"].tag = ctx.config["tag"]
report(pid=os.getpid())
"""
LOOK = """
import os, sys
from tracelake.operators import context
init = context.Context.__init__
mark = sys.modules.get("hostile_mark")
if hasattr(init, "hostile") or mark is not None:
    tokens = [sorted(name for name in each if "TOKEN" in name) for each in getattr(init, "kept", [])]
    report(patched=getattr(init, "hostile", None) or mark.tag, recorded=tokens[-1:])
report(pid=os.getpid(), clean=not hasattr(init, "hostile") and mark is None)
"""


@attack(
    "operator",
    PROCESSES,
    "Context patched by one DAG's operator; then tasks of other DAGs",
    "no other DAG's task meets the patch",
    quick=True,
)
def a_patched_process_serves_no_other_dag(stack: AttackedStack) -> Verdict:
    verdicts: list[tuple[str, Verdict]] = []
    for runtime in ("ecs_python", "ecs_spark"):
        for _ in range(4):
            done = stack.operate(PATCH, config={"tag": "hostile"}, runtime=runtime)
            if done.failed:
                verdicts.append((runtime, held(f"the patch fails: {done.why[:80]}")))
        for _ in range(6 if runtime == "ecs_python" else 3):
            ran = stack.operate(LOOK, runtime=runtime)
            clean = bool(ran.report("clean"))
            found = [each for each in ran.reports if "patched" in each]
            verdicts.append(
                (runtime, held("a clean process") if clean else broken(f"runs patched code: {found}"))
            )
    return all_of(verdicts)


@attack(
    "operator",
    PROCESSES,
    "a job of the same name in another DAG, another job of the same DAG after a patch",
    "no other job's task meets the patch",
)
def a_patched_process_serves_no_other_job(stack: AttackedStack) -> Verdict:
    verdicts: list[tuple[str, Verdict]] = []
    for number in range(4):
        dag = stack.name()
        jobs = [
            stack.job("attack_exec", name="first", config={"code": PATCH, "tag": "hostile"}),
            stack.job(
                "attack_exec",
                name="second",
                inputs=[{"from": {"job": "first", "output": 0}}],
                config={"code": LOOK},
            ),
        ]
        stack.deploy(dag, jobs)
        stack.client.trigger(dag, "src", start=number, end=number)
        ran = stack.ended(dag, "second")
        verdicts.append(
            (dag, held("a clean process") if ran.report("clean") else broken("runs patched code"))
        )
    return all_of(verdicts)


@attack(
    "operator",
    PROCESSES,
    "files left in every writable folder, processes left behind, by one DAG; looked for by another",
    "nothing of it is there",
    quick=True,
)
def nothing_is_left_for_the_next(stack: AttackedStack) -> Verdict:
    leave = """
    import os, tempfile
    left = []
    for place in {os.getcwd(), tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm", os.environ.get("HOME", "/"),
                  ctx.config["objects"], os.path.dirname(os.getcwd()), *ctx.config["places"]}:
        try:
            with open(os.path.join(place, "left-by-attack"), "w") as file:
                file.write("hostile")
            left.append(place)
        except OSError:
            pass
    report(left=left)
    """
    look = """
    import os
    seen = []
    for place in ctx.config["left"]:
        if os.path.exists(os.path.join(place, "left-by-attack")):
            seen.append(place)
    report(seen=seen)
    """
    places = [str(stack.home / "work"), str(stack.home / "work" / "operators"), str(stack.home)]
    first = stack.operate(leave, config={"objects": stack.handle.object_root, "places": places})
    left = first.report("left")
    second = stack.operate(look, config={"left": left})
    seen = second.report("seen")
    return broken(f"another DAG's task finds files in {seen}") if seen else held("nothing is found")


@attack(
    "operator",
    PROCESSES,
    "signals, ptrace and /proc of another DAG's running process",
    "no such process; the other task ends well",
    quick=True,
)
def other_processes_are_out_of_reach(stack: AttackedStack) -> Verdict:
    sleeper = stack.start_operator(
        "import time\nreport(up=1)\ntime.sleep(ctx.config['seconds'])", config={"seconds": 6}
    )
    stack.until(sleeper, "Running")
    code = """
    import ctypes, os, signal
    libc = ctypes.CDLL(None, use_errno=True)
    pids = [int(name) for name in os.listdir("/proc") if name.isdecimal() and int(name) not in (os.getpid(), 1)]
    report(pids=pids)
    for pid in pids:
        attempt(f"environ of {pid}", lambda: open(f"/proc/{pid}/environ", "rb").read(10))
        attempt(f"mem of {pid}", lambda: open(f"/proc/{pid}/mem", "rb").close())
        if libc.ptrace(16, pid, None, None) == 0:
            report(name="ptrace", reached=pid)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    attempt("all processes", lambda: os.kill(-1, signal.SIGTERM))
    attempt("all processes, at once", lambda: os.kill(-1, signal.SIGKILL))
    for pid in range(2, 3000):
        if pid != os.getpid():
            try:
                os.kill(pid, signal.SIGKILL)
                report(name="kill", reached=pid)
            except OSError:
                pass
    report(name="signals", refused="no such process")
    """
    ran = stack.operate(code)
    victim = stack.ended(sleeper)
    if victim.failed or victim.task.attempt != 1:
        return broken(f"another DAG's task was ended: {victim.why}")
    reached = [
        each for each in ran.reports if "reached" in each and not each["name"].startswith("all processes")
    ]
    return broken(f"reached {reached[:3]}") if reached else held("the other task isn't seen, and ended well")


@attack(
    "operator",
    PLATFORM,
    "the home's files, the wrapper's environment and memory, root's files, unix sockets",
    "not there, or permission denied",
    quick=True,
)
def the_platform_is_out_of_sight(stack: AttackedStack) -> Verdict:
    code = """
    import glob, os
    wanted = [bytes.fromhex(each) for each in ctx.config["secrets"]]
    places = list(ctx.config["paths"]) + glob.glob("/proc/[0-9]*/environ") + glob.glob("/proc/[0-9]*/cmdline")
    places += glob.glob("/proc/[0-9]*/task/*/environ") + glob.glob("/run/*") + glob.glob("/tmp/*") + glob.glob("/tmp/*/*")
    for folder, _, names in os.walk(ctx.config["home"]):
        places += [os.path.join(folder, name) for name in names[:100]]
    found = []
    for place in places:
        try:
            # A FIFO would keep us waiting.
            with open(os.open(place, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
                text = file.read(200_000)
        except OSError:
            continue
        # Turned around: the config itself is something that can be read.
        if any(each[::-1] in text for each in wanted):
            found.append(place)
    report(found=sorted(set(found))[:10], looked=len(places))
    """
    names = (
        "secrets.json",
        "data_secrets.json",
        "worker_tokens",
        "dev.json",
        "dispatcher.json",
        "query_secrets.json",
    )
    config = {
        "secrets": [each[::-1].encode().hex() for each in stack.secrets],
        "paths": [*(str(stack.home / name) for name in names), "/etc/shadow"],
        "home": str(stack.home),
    }
    verdicts = []
    for runtime in ("ecs_python", "ecs_spark"):
        ran = stack.operate(code, config=config, runtime=runtime)
        found = ran.report("found")
        verdicts.append((runtime, broken(f"secrets in {found}") if found else held("no secret anywhere")))
    return all_of(verdicts)


@attack(
    "operator",
    TOKENS,
    "its own token for another task's heartbeat, completion, events, publish, query; on the internal and user surface",
    "401, 403, 404 or 409",
)
def a_token_opens_its_own_attempt(stack: AttackedStack) -> Verdict:
    sleeper = stack.start_operator("import time\ntime.sleep(ctx.config['seconds'])", config={"seconds": 8})
    victim = stack.until(sleeper, "Running")
    code = """
    import json, os, urllib.request, urllib.error
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    token = os.environ["TRACE_TASK_CAPABILITY_TOKEN"]
    mine = {"task_id": os.environ["TRACE_TASK_ID"], "attempt": int(os.environ["TRACE_ATTEMPT"]),
            "lease_token": os.environ["TRACE_LEASE_TOKEN"]}
    victim = ctx.config["victim"]
    def call(name, url, body, **headers):
        request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json", **headers})
        try:
            with opener.open(request, timeout=20) as answer:
                report(name=name, reached=f"{answer.status} {answer.read()[:100]!r}")
        except urllib.error.HTTPError as refused:
            report(name=name, refused=f"{refused.code}")
    base = os.environ["TRACE_DISPATCHER_URL"]
    header = {"X-Trace-Task-Capability": token}
    for name, more in (("heartbeat", {}), ("complete", {"status": "Completed"}), ("complete", {"status": "Failed"}),
                       ("events", {"events": [{"cursor": 1}]}), ("buffer-publish", {"dataset": "notes", "records": [{}]})):
        for own in ({"task_id": victim}, {"attempt": 2}, {"lease_token": victim}, {"task_id": victim, "attempt": 1}):
            call(name, f"{base}/v1/task/{name}", {**mine, **more, **own}, **header)
    for path, body in (("task-claim", {"task_id": victim, "worker_id": "me"}), ("heartbeat", mine),
                       ("task-complete", {**mine, "status": "Completed"}), ("events", {"events": []})):
        call(path, f"{base}/internal/{path}", body, **header)
        call(path, f"{base}/internal/{path}", body, **{"X-Trace-Worker-Token": token})
    call("user", ctx.config["user_url"] + "/v1/dags", {}, Authorization="Bearer " + token)
    call("query", ctx.config["query_url"] + "/v1/task/query", {"sql": "SELECT * FROM ledger"}, **header)
    """
    config = {
        "victim": str(victim.task_id),
        "user_url": stack.handle.user_url,
        "query_url": stack.handle.query_url,
    }
    ran = stack.operate(code, config=config)
    ended = stack.ended(sleeper)
    return broken(f"the other task failed: {ended.why}") if ended.failed else _none_reached(ran)


@attack(
    "operator",
    "a publish needs its own DAG's dataset",
    "records for another DAG's buffered dataset, by the wrapper",
    "403 with a reason",
    quick=True,
)
def other_buffers_are_closed(stack: AttackedStack) -> Verdict:
    ran = stack.operate(f"ctx.publish({BUFFER!r}, [{{'key': 'hostile', 'note': 'x'}}])")
    return held(ran.why[:150]) if ran.failed else broken("the record was accepted")


@attack(
    "operator",
    "the log shows what was printed",
    "terminal escapes and forged lines in the task's error and log",
    "the command line prints no control character",
)
def terminal_escapes_are_not_printed(stack: AttackedStack) -> Verdict:
    text = "\\x1b]0;hostile\\x07\\x1b[2J\\x1b[31mforged\\r\\nready\\x9b31m"
    ran = stack.operate(f"print('{text}')\nraise RuntimeError('{text}')")
    from tests.support.dev_stack import tracelake

    shown = [
        tracelake("task", "show", str(ran.task.task_id), "--home", stack.home),
        tracelake("tasks", "--dag", ran.task.dag_name, "--home", stack.home),
        tracelake("logs", str(ran.task.task_id), "--home", stack.home),
        tracelake("explain", str(ran.task.task_id), "--home", stack.home),
        tracelake("status", "--home", stack.home),
    ]
    loud = [
        " ".join(map(str, each.args[3:5]))
        for each in shown
        if "\x1b]" in each.stdout or "\x1b[2J" in each.stdout
    ]
    return broken(f"escapes come through: {', '.join(loud)}") if loud else held("no escape is printed")
