"""The engine of queries: a gate for their text, and confined processes that run them."""
