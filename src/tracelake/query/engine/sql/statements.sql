-- name: create_view
-- A relation of the query, under the name that the query uses.
CREATE VIEW {name} AS {rows}

-- name: drop_view
-- What warmed the engine up is gone before anybody's SQL comes.
DROP VIEW {name}

-- name: rows_of
-- Of one source: a list of files, or a table of Arrow.
SELECT {columns} FROM {source}

-- name: no_rows_of
-- Columns without rows.
SELECT {columns} FROM {source} WHERE false

-- name: settings
-- What the engine says of itself.
SELECT {settings}
