-- name: state
-- The settings that a role can change itself, and the comment that names its installation; a row only if it exists.
SELECT shobj_description(r.oid, 'pg_authid') AS comment,
       array(SELECT c FROM pg_db_role_setting s, unnest(s.setconfig) AS c
             WHERE s.setrole = r.oid AND s.setdatabase = 0) AS everywhere,
       array(SELECT c FROM pg_db_role_setting s, unnest(s.setconfig) AS c
             WHERE s.setrole = r.oid
               AND s.setdatabase = (SELECT oid FROM pg_database WHERE datname = current_database())) AS here
FROM pg_roles AS r
WHERE rolname = $1::text

-- name: may_read_verifiers
-- Superusers may, and roles that they have granted it.
SELECT has_table_privilege('pg_catalog.pg_authid', 'SELECT')

-- name: verifier
-- The server checks passwords against it.
SELECT rolpassword FROM pg_authid WHERE rolname = $1::text

-- name: mark
-- The statement. A role can change its own password and settings, but not the comment on it.
SELECT format('COMMENT ON ROLE %I IS %L', $1::text, $2::text)

-- name: reset_settings
-- The statements.
SELECT format('ALTER ROLE %1$I RESET ALL; ALTER ROLE %1$I IN DATABASE %2$I RESET ALL', $1::text, current_database())
