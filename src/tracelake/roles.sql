-- name: role
-- What the role is before it is touched; a row only if it exists.
SELECT rolsuper OR rolcreaterole OR rolcreatedb OR rolreplication OR rolbypassrls AS privileged,
       EXISTS (SELECT FROM pg_auth_members WHERE member = r.oid) AS member,
       EXISTS (SELECT FROM pg_shdepend WHERE refclassid = 'pg_authid'::regclass AND refobjid = r.oid
                                         AND deptype = 'o') AS owner
FROM pg_roles AS r
WHERE rolname = $1::text

-- name: create_role
-- The statement, with name and verifier quoted by the server.
SELECT format('CREATE ROLE %I LOGIN NOINHERIT PASSWORD %L', $1::text, $2::text)

-- name: change_role
-- The same for a role that an earlier install made: its password is the one given last.
SELECT format('ALTER ROLE %I LOGIN NOINHERIT PASSWORD %L', $1::text, $2::text)
