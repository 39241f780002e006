"""The files that `tracelake init` writes."""
