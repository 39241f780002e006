"""The reference pages of ``docs/``, made from what the code itself goes by; ``python -m tracelake.reference``
writes them."""
