"""The decode pool."""
