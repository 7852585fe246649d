"""Paged KV: blocks, hashes, the prefix cache, the tensors."""
