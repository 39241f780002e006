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
-- $1 loads staging tables and can do nothing else; $2 commits them, and may do with staging tables what $1 may.
SELECT format(
    'GRANT CONNECT ON DATABASE %3$I TO %1$I, %2$I;
     GRANT USAGE, CREATE ON SCHEMA staging TO %1$I;
     GRANT %1$I TO %2$I;
     GRANT USAGE ON SCHEMA tracelake TO %2$I;
     GRANT USAGE, CREATE ON SCHEMA data TO %2$I;
     GRANT USAGE ON SCHEMA staging TO %2$I;
     GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA tracelake TO %2$I;
     GRANT USAGE ON ALL SEQUENCES IN SCHEMA tracelake TO %2$I;
     ALTER ROLE %1$I IN DATABASE %3$I SET search_path = staging;
     ALTER ROLE %1$I IN DATABASE %3$I SET idle_in_transaction_session_timeout = ''10min'';
     ALTER ROLE %2$I IN DATABASE %3$I SET idle_in_transaction_session_timeout = ''60s''',
    $1::text, $2::text, current_database()
)

-- name: revoke_functions
-- Functions are open to everybody until somebody closes them.
REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA tracelake FROM PUBLIC

-- name: grant_functions
-- The writer calls them.
SELECT format('GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA tracelake TO %I', $1::text)
