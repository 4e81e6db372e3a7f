"""Small commands beside training: ``sorl NAME ...``, one a file."""
