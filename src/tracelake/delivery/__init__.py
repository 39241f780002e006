"""Deliveries: rows of buffered datasets, sent to webhooks, chat and mail, and retracted there too after a reorg.

Each delivery is a leased task. Rows become messages at the Dispatcher, which also knows which try has begun: a
message is sent at least once, always under the same id, whatever dies in between. Receivers aren't trusted: their
addresses are resolved and checked here, their answers are read in part, and each try has a deadline.
"""
