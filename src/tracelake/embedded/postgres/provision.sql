-- name: find_role
-- An existing role keeps its grants; only its password is brought in line with the folder's.
SELECT 1 FROM pg_roles WHERE rolname = %(role)s;

-- name: create_role
-- A login that can do nothing until it owns or is granted something.
CREATE ROLE {role} LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE NOREPLICATION PASSWORD {verifier};

-- name: set_password
-- The passwords file is the truth: after it was replaced, roles follow it.
ALTER ROLE {role} PASSWORD {verifier};

-- name: find_database
-- CREATE DATABASE knows no IF NOT EXISTS.
SELECT 1 FROM pg_database WHERE datname = %(database)s;

-- name: create_database
-- Owned from the start, so that a role can be given a database without being given anything else.
CREATE DATABASE {database} OWNER {owner};

-- name: close_database
-- PUBLIC may connect to a new database by default; here only its owner and the roles that it grants CONNECT.
REVOKE ALL ON DATABASE {database} FROM PUBLIC;

-- name: close_maintenance_database
-- The superuser's own databases aren't for other roles.
REVOKE ALL ON DATABASE postgres, template1 FROM PUBLIC;
