"""The commands of `pdserve`, one module each."""
