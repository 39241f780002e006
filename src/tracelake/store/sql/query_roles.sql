-- name: close_database
-- Only granted roles may connect or create anything: the state database has two guest roles, with grants of their
-- own.
SELECT format('REVOKE ALL ON DATABASE %I FROM PUBLIC; REVOKE ALL ON SCHEMA public FROM PUBLIC', current_database())

-- name: grant_catalog
-- $1 reads the views. Each is named, so that other objects in the schema are not granted.
SELECT format(
    'GRANT CONNECT ON DATABASE %2$I TO %1$I;
     GRANT USAGE ON SCHEMA catalog TO %1$I;
     GRANT SELECT ON catalog.dataset_version, catalog.partition, catalog.file, catalog.task, catalog.user_token
         TO %1$I;
     ALTER ROLE %1$I IN DATABASE %2$I SET search_path = catalog;
     ALTER ROLE %1$I IN DATABASE %2$I SET default_transaction_read_only = on;
     ALTER ROLE %1$I IN DATABASE %2$I SET statement_timeout = ''10s'';
     ALTER ROLE %1$I IN DATABASE %2$I SET idle_in_transaction_session_timeout = ''10s''',
    $1::text, current_database()
)

-- name: grant_audit
-- $1 adds rows, and can't even read them.
SELECT format(
    'GRANT CONNECT ON DATABASE %2$I TO %1$I;
     GRANT USAGE ON SCHEMA catalog TO %1$I;
     GRANT INSERT ON catalog.query_audit TO %1$I;
     ALTER ROLE %1$I IN DATABASE %2$I SET search_path = catalog;
     ALTER ROLE %1$I IN DATABASE %2$I SET statement_timeout = ''10s'';
     ALTER ROLE %1$I IN DATABASE %2$I SET idle_in_transaction_session_timeout = ''10s''',
    $1::text, current_database()
)
