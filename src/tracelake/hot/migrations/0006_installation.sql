-- The passwords of the logins that processes share. They belong to the database, so that a home that installs it again
-- takes what is there instead of locking the others out. In a schema of its own, which no role but the owner may use.
CREATE SCHEMA installation;
REVOKE ALL ON SCHEMA installation FROM PUBLIC;

CREATE TABLE installation.login (
    role        text PRIMARY KEY,
    password    text NOT NULL,
    changed_at  timestamptz NOT NULL DEFAULT statement_timestamp()
);
