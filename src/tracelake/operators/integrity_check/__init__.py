"""``integrity_check``: stored blocks against themselves and against the chain; what is wrong is taken back."""
