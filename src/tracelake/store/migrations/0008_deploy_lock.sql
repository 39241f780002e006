-- What deploys lock, and whoever routes or claims shares (store/db.py). It has no rows and needs none. An advisory lock
-- did this before, and guests of this database could hold one for ever.
CREATE TABLE deploy_lock ();
