"""Deep windows: N decode cycles of a live server under the profiler, joined to the points and cycles of its ring."""

from specmeter.trace.deep_window import KERNEL, MEMCPY, MEMSET, Columns, DeepWindow, kernel_columns, sync_columns

__all__ = ["KERNEL", "MEMCPY", "MEMSET", "Columns", "DeepWindow", "kernel_columns", "sync_columns"]
