"""Workers: a wrapper that takes tasks and speaks for them, and the operator processes that it runs them in."""
