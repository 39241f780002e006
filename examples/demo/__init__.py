"""The demo: a chain becomes tables, alerts and answers, with things killed on the way."""
