-- Functions are no longer defined by migrations: they are in files of their own, which an install applies when they have
-- changed. A row for every set of files that was applied, the last one being the one in force.
CREATE TABLE installation.function_set (
    number      bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    sha256      text NOT NULL UNIQUE,
    applied_at  timestamptz NOT NULL DEFAULT statement_timestamp()
);
