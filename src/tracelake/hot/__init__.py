"""Hot storage: the data database, where Postgres outputs live.

Three roles, none of which can do another's work: operators load ``staging`` tables, workers' wrappers commit them
into ``data``, and readers read. A commit is one transaction that checks the attempt's fence, replaces a range and
records the events that follow from it.
"""
