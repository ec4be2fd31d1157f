"""Why a server died, from its log: an outer process points to the cause that stands before it."""

from __future__ import annotations

from pathlib import Path

import pytest

from specmeter.engines.causes import cause_in_log

ROOT = "ValueError: Available memory on node 0 (19.24/23.54 GiB) on startup is less than desired CPU memory utilization"
PASSING = "WARNING 11-30 12:00:00 [interface.py:4] Failed to import: ImportError: no such library\n"
WORKER = f"(EngineCore pid=7) ERROR 11-30 12:00:01 [core.py:1136] {ROOT} (0.92, 21.66 GiB).\n"
WRAPPED = "(Engine pid=7) Exception: WorkerProc initialization failed due to an exception in a background process.\n"
OUTER = "(APIServer pid=5) RuntimeError: Engine core initialization failed. See root cause above. Failed: {}\n"
EARLIER = "ERROR 11-30 11:00:00 [serving.py:9] KeyError: one request of the morning\n"


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (PASSING + WORKER + "(EngineCore pid=7)   File 'core.py', line 3\n" + WRAPPED + OUTER, ROOT),
        (EARLIER + WORKER, ROOT),
        (OUTER, "RuntimeError: Engine core initialization failed."),
        ("nothing of the kind\n", "it ended with exit code 1"),
    ],
)
def test_the_cause_is_the_one_that_the_last_error_points_to(tmp_path: Path, log: str, cause: str) -> None:
    (tmp_path / "server.log").write_text(log)
    assert cause_in_log(tmp_path / "server.log", 1).startswith(cause)
