-- name: advance_epochs
-- Beyond every epoch that was ever drawn, those after the backup included.
SELECT setval('epoch_seq', nextval('epoch_seq') + $1::bigint)
