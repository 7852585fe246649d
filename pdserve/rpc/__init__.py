"""The wire: generated stubs, channels, codecs, statuses."""
