-- name: create_view
-- A relation of the query, under the name that the query uses.
CREATE VIEW {name} AS {rows}

-- name: replace_view
-- The same relation with the digits of its integers; several statements of one connection may need it.
CREATE OR REPLACE VIEW {name} AS {rows}

-- name: drop_view
-- Remove the warm-up relation before a caller's SQL arrives.
DROP VIEW {name}

-- name: rows_of
-- The rows of one source: a list of files, or an Arrow table.
SELECT {columns} FROM {source}

-- name: no_rows_of
-- Columns without rows.
SELECT {columns} FROM {source} WHERE false

-- name: settings
-- Read settings back from the engine.
SELECT {settings}
