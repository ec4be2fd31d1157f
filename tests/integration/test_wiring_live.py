"""``check --link`` on real running servers: the embedded engine and vLLM on CPU, wired right and wrong."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from specmeter.control import Link, disarm, launch_env, processes
from specmeter.control.prepare import prepare_link
from specmeter.eagle.model_store import ensure_model
from specmeter.engines import engine_named
from specmeter.engines.base import ServerSpec
from specmeter.engines.server import Server
from tests.support import real_vllm

pytestmark = pytest.mark.engine
VLLM = os.environ.get("SPECMETER_VLLM_PYTHON")
HEAD = sorted(real_vllm.HEADS.glob("smollm2-135m*/config.json"))[-1].parent
IDS = "eagle_aux_hidden_state_layer_ids"
STATES = tuple(json.loads((HEAD / "config.json").read_text())["specmeter_capture"])


def rewired(folder: Path, **values: object) -> Path:
    """A copy of the shipped head with some keys of its config changed."""
    copy = folder / "head"
    shutil.copytree(HEAD, copy)
    path = copy / "config.json"
    path.chmod(0o600)
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return copy


def check(head: Path, link: Link, *more: str) -> tuple[int, dict[str, Any]]:
    """Exit code and result of ``check --link --json``."""
    words = ["check", "--target", str(ensure_model()), "--draft", str(head), "--link", link.id, "--json", *more]
    done = subprocess.run(
        [sys.executable, "-m", "specmeter", *words], capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "XDG_RUNTIME_DIR": str(link.path.parents[1])},
    )  # fmt: skip
    document = json.loads(done.stdout)
    return done.returncode, document.get("result") or document["error"]


def ids_of(result: dict[str, Any], severity: str = "error") -> set[str]:
    return {finding["id"] for finding in result["findings"] if finding["severity"] == severity}


def links_folder(folder: Path) -> Path:
    """A base folder for links, below an XDG_RUNTIME_DIR of this test's own."""
    return real_vllm.private(real_vllm.private(folder / "runtime") / "specmeter")


@contextmanager
def embedded(head: Path, folder: Path) -> Iterator[tuple[Link, str]]:
    words = (sys.executable, "-m", "specmeter", "serve", "--threads", "1", "--draft", str(head))
    link = prepare_link(words, engine="specmeter", base=links_folder(folder))
    spec = ServerSpec(engine="embedded", command=words)
    with Server.start(
        engine_named("embedded"), spec, folder / "server.log", extra_env=launch_env(link, {**os.environ})
    ) as server:
        yield link, server.url


def test_the_embedded_engine_captures_what_its_head_states(tmp_path: Path) -> None:
    with embedded(HEAD, tmp_path) as (link, url):
        code, result = check(HEAD, link, "--url", url)
        assert (code, ids_of(result)) == (0, set())
        (process,) = result["live"]["processes"]
        assert tuple(process["states"]) == tuple(process["captured_ids"]) == STATES
        assert process["draft_sharded_over"] == 1
        assert process["values"]["fed"][1] == 3 * 576
        assert [p.armed for p in processes(link)] == [False], "dormant again after the check"

        # No request: the reason, and nothing left armed.
        code, failure = check(HEAD, link, "--wait", "0.3")
        assert code == 4 and "no request reached the engine" in failure["what"]
        assert not link.document()["state"]["armed"]

        # Files that this server was not started with.
        other = rewired(tmp_path, specmeter_capture=[2, 16, 29])
        code, result = check(other, link, "--url", url, "--steps", "7")
        assert code == 1 and {"live-differs"} <= ids_of(result)


def test_a_miswired_copy_on_the_embedded_engine_is_reported(tmp_path: Path) -> None:
    wrong = rewired(tmp_path, specmeter_capture=[0, *STATES[1:]])
    with embedded(wrong, tmp_path) as (link, url):
        trained = ",".join(map(str, STATES))
        code, result = check(wrong, link, "--url", url, "--trained", trained)
        assert code == 1 and {"embedding-fed", "live-embedding-fed"} <= ids_of(result)
        assert "live-differs" not in ids_of(result), "the files promise what the process does"
        code, result = check(HEAD, link, "--url", url)
        assert code == 1 and ids_of(result) == {"live-differs", "live-embedding-fed"}


@pytest.mark.vllm
@pytest.mark.skipif(not VLLM, reason="SPECMETER_VLLM_PYTHON names no environment with vLLM")
@pytest.mark.skipif(bool(real_vllm.NO_MORE), reason=str(real_vllm.NO_MORE))
def test_a_running_vllm_against_right_and_wrong_files(tmp_path: Path) -> None:
    """One start, with a head whose ids are one layer too low: found from its own files, and from the right ones."""
    assert VLLM is not None
    wrong = rewired(tmp_path, **{IDS: [k - 1 for k in STATES]})
    words = real_vllm.command(VLLM, tmp_path)
    assert str(wrong) in " ".join(words)
    link = prepare_link(words, engine="vllm", base=links_folder(tmp_path), capacity=1 << 16)
    right = rewired(tmp_path / "right", **{IDS: list(STATES)})
    trained = ",".join(map(str, STATES))
    with real_vllm.server(words, launch_env(link), tmp_path / "vllm.log") as url:
        code, result = check(wrong, link, "--url", url, "--trained", trained)
        assert code == 1 and {"wiring-shift", "live-shift"} <= ids_of(result)
        assert "live-differs" not in ids_of(result)
        (process,) = result["live"]["processes"]
        assert process["captured_ids"] == process["states"] == [k - 1 for k in STATES]
        assert process["runner"] == "model runner V1"
        assert process["draft_sharded_over"] == 1
        assert process["values"]["fc_inputs"] == [3 * 576] and process["values"]["target_layers"] == [30]

        code, result = check(right, link, "--url", url)
        assert code == 1 and {"live-differs", "live-shift"} == ids_of(result)
        assert not [p for p in processes(link, alive_only=True) if p.armed]
    disarm(link)
