"""SGLang's own plugin loader, from real wheels, loads specmeter's entry point and starts the runtime once.

The loader's file and what it imports run as they are. The package's ``__init__`` above them does not: it imports torch
and all of SGLang's frontend, which is not installed here. So no engine module is imported either: whether one will be
watched is read from its spec.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from corpus_fetch import fetch  # noqa: E402

from specmeter.control import launch_env  # noqa: E402
from specmeter.control.prepare import prepare_link  # noqa: E402
from tests.support.installed import installed  # noqa: E402

LOADER = """
import importlib.util, json, logging, sys, types
tree = sys.argv[1]
sglang = types.ModuleType("sglang")
sglang.__path__ = [tree + "/sglang"]
sys.modules["sglang"] = sglang
before = "_specmeter_runtime.boot" in sys.modules
import sglang.srt.plugins as plugins
said = []
plugins.logger.setLevel(logging.INFO)
class Kept(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())
plugins.logger.addHandler(Kept())
plugins.load_plugins()
first = sys.modules["_specmeter_runtime.boot"].current()
plugins._plugins_loaded = False
plugins.load_plugins()
hooks = sum(type(finder).__name__ == "ImportHook" for finder in sys.meta_path)
again = sys.modules["_specmeter_runtime.boot"].current()
loader = importlib.util.find_spec("sglang.srt.managers.overlap_utils").loader
watched = "exec_module" in vars(loader) and loader.path.startswith(tree)
print(json.dumps([before, plugins.__file__.startswith(tree), first is again, first.link, watched, hooks, said]))
"""


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("release", ["sglang==0.5.16", "sglang==0.5.23"])
def test_sglang_s_own_plugin_loader_starts_the_runtime_once(release: str, both: bool, tmp_path: Path) -> None:
    try:
        tree = fetch(release)
    except RuntimeError as error:
        pytest.skip(f"the wheel cannot be had: {error}")
    (tmp_path / "links").mkdir(mode=0o700)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SPECMETER_", "SGLANG_"))}
    engine = {**clean, "PYTHONPATH": str(tree)}
    link = prepare_link([sys.executable], engine="sglang", base=tmp_path / "links", env=engine)
    assert link.plan()["engine_version"] == release.partition("==")[2]
    env = {**clean, "PYTHONPATH": str(installed(tmp_path / "site")), "SPECMETER_LINK": str(link.path)}
    env = launch_env(link, env) if both else env
    done = subprocess.run(
        [sys.executable, "-c", LOADER, str(tree)], env=env, capture_output=True, text=True, cwd=tmp_path, timeout=100
    )
    assert done.returncode == 0, done.stderr[-2000:]
    before, theirs, once, link_path, watched, hooks, said = json.loads(done.stdout.splitlines()[-1])
    assert (before, theirs, once, link_path, watched) == (both, True, True, str(link.path), True)
    assert hooks == 2, "one hook for modules, one for the tracer"
    assert said.count("Executed general plugin: specmeter") == 2 and not [text for text in said if "Failed" in text]
