"""The operator host: a private view of the machine, and operator processes that are ready in it."""
