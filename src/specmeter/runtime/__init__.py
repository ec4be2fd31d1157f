"""What runs inside the server process: standard library of CPython 3.9 only, imports nothing else of the project."""
