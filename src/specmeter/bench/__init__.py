"""Load against a server, and what it measures from the client's side."""
