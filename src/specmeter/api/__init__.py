"""What ``specmeter.load`` gives a script or notebook: saved runs with data frames, plots and a rich display."""

from specmeter.api.saved import Plot, RunDiff, SavedRun, load

__all__ = ["Plot", "RunDiff", "SavedRun", "load"]
