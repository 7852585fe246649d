"""Building blocks of a decoder layer."""
