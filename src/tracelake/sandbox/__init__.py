"""The sandbox for untrusted code: bubblewrap, a system call filter, limits, and a gateway as the only way out."""
