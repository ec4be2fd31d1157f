"""What holds for every test."""

from __future__ import annotations

import signal

try:
    from hypothesis import HealthCheck, settings

    # What is drawn is the same at every run, and slowness is no failure: a red run means that something has changed.
    # `pytest --hypothesis-profile=explore` looks for new examples.
    settings.register_profile("steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("steady")
except ImportError:  # the tests on a GPU go without
    pass

# A suite started in the background of a script, or under nohup, inherits ignored signals and hands them on: whoever is
# interrupted by a test would not notice. A handler of ours becomes the default one in every process that is started.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)
