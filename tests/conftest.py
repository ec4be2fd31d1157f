"""What holds for every test."""

from __future__ import annotations

import signal

# A suite started in the background of a script, or under nohup, inherits ignored signals and hands them on: whoever is
# interrupted by a test would not notice. A handler of ours becomes the default one in every process that is started.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)
