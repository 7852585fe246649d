"""The OpenAI-compatible HTTP front, in the router's own process and event loop."""
