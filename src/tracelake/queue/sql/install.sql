-- name: has_old_ledger
-- Whether the queue was made by a release that counted versions without names and hashes.
SELECT to_regclass('tracelake_queue.schema_version') IS NOT NULL;

-- name: lock_old_ledger
-- An installer of such a release that is at work now gets to its end first.
LOCK TABLE tracelake_queue.schema_version IN SHARE ROW EXCLUSIVE MODE;

-- name: old_versions
-- The table stays as it is, so that workers of such a release can still start while the others are being upgraded. The
-- next migration drops it: from then on they must not.
SELECT version FROM tracelake_queue.schema_version ORDER BY version;

-- name: close_database
-- Revokes the rights that PUBLIC has in a new database: only the queue's role connects to this one.
SELECT format('REVOKE ALL ON DATABASE %I FROM PUBLIC', current_database());

-- name: close_public_schema
-- Only the owner of the queue's database creates anything in it.
REVOKE ALL ON SCHEMA public FROM PUBLIC;

-- name: let_notify
-- PUBLIC may notify until that is revoked; then the role needs a grant, since receivers wait for its messages.
SELECT CASE WHEN has_function_privilege($1::text, 'pg_notify(text, text)', 'EXECUTE') THEN 'SELECT'
            ELSE format('GRANT EXECUTE ON FUNCTION pg_notify(text, text) TO %I', $1::text) END;

-- name: grants
-- All rights of the role. Rows can be read and written; tables can't be emptied by TRUNCATE or altered.
SELECT format(
    'GRANT CONNECT ON DATABASE %2$I TO %1$I;
     GRANT USAGE ON SCHEMA tracelake_queue TO %1$I;
     GRANT SELECT ON tracelake_queue.schema_migration TO %1$I;
     GRANT SELECT, INSERT, UPDATE, DELETE ON tracelake_queue.messages, tracelake_queue.dead_letters TO %1$I;
     ALTER ROLE %1$I IN DATABASE %2$I SET idle_in_transaction_session_timeout = ''10s'';
     ALTER ROLE %1$I IN DATABASE %2$I SET statement_timeout = ''60s''',
    $1::text, current_database()
);

-- name: other_databases
-- Other databases that the role can connect to: every database is open to PUBLIC until that is revoked.
SELECT datname
FROM pg_database
WHERE datallowconn AND datname <> current_database() AND has_database_privilege($1::text, oid, 'CONNECT')
ORDER BY datname;

-- name: close_to_public
-- Owners and superusers still get in; any other role needs a GRANT CONNECT of its own from then on.
SELECT format('REVOKE CONNECT, TEMPORARY ON DATABASE %I FROM PUBLIC', $1::text);
