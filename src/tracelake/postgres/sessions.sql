-- name: end_transactions_after
-- Sets the limit where the server has one, from Postgres 17 on; for the session.
SELECT set_config('transaction_timeout', $1, false) FROM pg_settings WHERE name = 'transaction_timeout'
