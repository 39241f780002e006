-- name: close_database
-- Takes from everybody what Postgres gives everybody in a new database; this one has a single guest.
SELECT format('REVOKE ALL ON DATABASE %I FROM PUBLIC', current_database());

-- name: close_public_schema
-- In the queue's database nobody creates anything but its owner.
REVOKE ALL ON SCHEMA public FROM PUBLIC;

-- name: let_notify
-- Everybody may notify until that is taken back, and then the role, whose messages others wait for.
SELECT CASE WHEN has_function_privilege($1::text, 'pg_notify(text, text)', 'EXECUTE') THEN 'SELECT'
            ELSE format('GRANT EXECUTE ON FUNCTION pg_notify(text, text) TO %I', $1::text) END;

-- name: grants
-- All that the role may do. Rows can be read and written; tables can't be emptied by TRUNCATE or altered.
SELECT format(
    'GRANT CONNECT ON DATABASE %2$I TO %1$I;
     GRANT USAGE ON SCHEMA tracelake_queue TO %1$I;
     GRANT SELECT ON tracelake_queue.schema_version TO %1$I;
     GRANT SELECT, INSERT, UPDATE, DELETE ON tracelake_queue.messages, tracelake_queue.dead_letters TO %1$I;
     ALTER ROLE %1$I IN DATABASE %2$I SET idle_in_transaction_session_timeout = ''10s'';
     ALTER ROLE %1$I IN DATABASE %2$I SET statement_timeout = ''60s''',
    $1::text, current_database()
);

-- name: other_databases
-- Where else the role could get in: every database is open to PUBLIC until somebody closes it.
SELECT datname
FROM pg_database
WHERE datallowconn AND datname <> current_database() AND has_database_privilege($1::text, oid, 'CONNECT')
ORDER BY datname;

-- name: close_to_public
-- Owners and superusers still get in; any other role needs a GRANT CONNECT of its own from then on.
SELECT format('REVOKE CONNECT, TEMPORARY ON DATABASE %I FROM PUBLIC', $1::text);
