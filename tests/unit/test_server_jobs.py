"""The engine's thread while no request is there."""

from __future__ import annotations

import ctypes
import threading
from typing import cast

from specmeter.eagle.server_jobs import Dispatcher, EngineLike


def test_an_idle_server_runs_what_a_debugger_has_queued() -> None:
    """`specmeter attach` queues a call for the main thread, which runs it at its next safe point: there must be one."""
    dispatcher = Dispatcher(cast(EngineLike, None), 1)
    ran = threading.Event()
    noted: list[bool] = []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
    def call(_argument: object) -> int:
        ran.set()
        return 0

    def queue() -> None:
        ctypes.pythonapi.Py_AddPendingCall(call, None)
        noted.append(ran.wait(60))
        dispatcher.stop()

    thread = threading.Timer(0.2, queue)  # the main thread waits by then
    thread.start()
    dispatcher.run()
    thread.join()
    assert noted == [True]
