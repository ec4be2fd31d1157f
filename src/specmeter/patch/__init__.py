"""A patch on disk, for servers that no other route reaches: a few lines at the end of one file, and back.

``block.py``, ``disk.py``, ``operate.py``, ``index.py`` and ``far.py`` run beside the server: standard library of
CPython 3.9, relative imports only. ``start.py`` is what the added lines run in the server.
"""
