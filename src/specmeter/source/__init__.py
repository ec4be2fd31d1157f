"""The engine's source as it stands where the server runs: located, outlined, resolved."""
