"""The flags of `pdserve serve`: one dataclass a noun, which becomes configuration."""
