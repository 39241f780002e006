"""Which HTTP framework serves the claim endpoint best: measured, see docs/adr/0001-http-framework.md."""
