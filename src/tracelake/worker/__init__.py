"""Workers: a wrapper that claims and reports tasks, and the operator processes that it runs them in."""
