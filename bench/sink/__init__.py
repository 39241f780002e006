"""Records from publish to committed, beside plain COPY into the same table."""
