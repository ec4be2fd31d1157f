"""Brings the runtime into a process that runs already: by its own control line, sys.remote_exec, or gdb."""
