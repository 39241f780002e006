-- name: role_exists
-- A role that an earlier install made keeps its name and gets the password given last.
SELECT EXISTS (SELECT FROM pg_roles WHERE rolname = $1::text)

-- name: create_role
-- The statement, with name and verifier quoted by the server.
SELECT format('CREATE ROLE %I LOGIN PASSWORD %L', $1::text, $2::text)

-- name: change_role
-- The same for a role that is there.
SELECT format('ALTER ROLE %I LOGIN PASSWORD %L', $1::text, $2::text)

-- name: close_database
-- Nobody gets in, or creates anything, but by a grant.
SELECT format('REVOKE ALL ON DATABASE %I FROM PUBLIC; REVOKE ALL ON SCHEMA public FROM PUBLIC', current_database())

-- name: grants
-- $1 loads staging tables and can do nothing else; $2 commits them, and may do with staging tables what $1 may. A
-- worker that stands still in the middle of a commit keeps its successor's fence waiting: not for long. A sink, which
-- is $2 as well, stages in tables of its own session.
SELECT format(
    'GRANT CONNECT ON DATABASE %3$I TO %1$I, %2$I;
     GRANT TEMPORARY ON DATABASE %3$I TO %2$I;
     GRANT USAGE, CREATE ON SCHEMA staging TO %1$I;
     GRANT %1$I TO %2$I;
     GRANT USAGE ON SCHEMA tracelake TO %2$I;
     GRANT USAGE, CREATE ON SCHEMA data TO %2$I;
     GRANT USAGE ON SCHEMA staging TO %2$I;
     GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA tracelake TO %2$I;
     GRANT USAGE ON ALL SEQUENCES IN SCHEMA tracelake TO %2$I;
     ALTER ROLE %1$I IN DATABASE %3$I SET search_path = staging;
     ALTER ROLE %1$I IN DATABASE %3$I SET idle_in_transaction_session_timeout = ''10min'';
     ALTER ROLE %2$I IN DATABASE %3$I SET idle_in_transaction_session_timeout = ''10s''',
    $1::text, $2::text, current_database()
)

-- name: act_as
-- What $1 will create can only be given to others by somebody who may act as $1, as a superuser may anyway.
SELECT CASE WHEN pg_has_role(current_user, $1::text, 'USAGE') THEN 'SELECT'
            ELSE format('GRANT %I TO CURRENT_USER', $1::text) END

-- name: grant_reading
-- $1 reads what is committed, tables that $2 will make included; it can't write, nor wait for ever.
SELECT format(
    'GRANT CONNECT ON DATABASE %3$I TO %1$I;
     GRANT USAGE ON SCHEMA data TO %1$I;
     GRANT SELECT ON ALL TABLES IN SCHEMA data TO %1$I;
     ALTER DEFAULT PRIVILEGES FOR ROLE %2$I IN SCHEMA data GRANT SELECT ON TABLES TO %1$I;
     ALTER ROLE %1$I IN DATABASE %3$I SET search_path = data;
     ALTER ROLE %1$I IN DATABASE %3$I SET default_transaction_read_only = on;
     ALTER ROLE %1$I IN DATABASE %3$I SET statement_timeout = ''5min'';
     ALTER ROLE %1$I IN DATABASE %3$I SET idle_in_transaction_session_timeout = ''5min''',
    $1::text, $2::text, current_database()
)

-- name: revoke_functions
-- Functions are open to everybody until somebody closes them.
REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA tracelake FROM PUBLIC

-- name: grant_functions
-- The writer calls them.
SELECT format('GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA tracelake TO %I', $1::text)
