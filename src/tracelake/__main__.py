"""``python -m tracelake`` is the ``tracelake`` command."""

from tracelake.cli.main import main

main()
