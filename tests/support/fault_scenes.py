"""Scenes for faults: the miniature server, and a real vLLM on CPU."""

from __future__ import annotations

import compileall
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

from specmeter.engines.process import free_port
from tests.support import fault_place, real_vllm
from tests.support.children import until
from tests.support.fault_events import Scene
from tests.support.fault_place import Place, Serving
from tests.support.loopback_ssh import loopback_sshd
from tests.support.tcp_proxy import TcpProxy

MINI = Path(__file__).parent / "mini_sglang"
MINI_CHECK = """
from minisgl.workers import EagleWorker, TpModelWorker
worker = EagleWorker(TpModelWorker())
print("fine" if sum(sum(worker.forward_batch_generation([0]).accepted) for _ in range(6)) == 6 else "wrong")
"""
VLLM_CHECK = """
import vllm.envs
print("fine" if vllm.__version__ else "wrong")
"""


@contextmanager
def mini_scene(folder: Path, token: str, size: str = "24m") -> Iterator[Scene]:
    """The miniature server on a small file system of its own. Ends everything at the end."""
    with ExitStack() as stack:
        disk = _disk(stack, folder / "disk", size)
        lib = disk / "lib"
        lib.mkdir()
        fault_place.copied_tree(MINI / "minisgl", lib / "minisgl")
        (lib / "minisgl-1.2.dist-info").mkdir()
        metadata = "Metadata-Version: 2.1\nName: minisgl\nVersion: 1.2\n"
        (lib / "minisgl-1.2.dist-info" / "METADATA").write_text(metadata)
        compileall.compile_dir(str(lib), quiet=1)
        options = ("--python", sys.executable, "--recipe", str(MINI / "minisgl.toml"))
        place = Place(disk, lib, sys.executable, options, MINI_CHECK, token)
        fault_place.patched_link(place, "serving")
        shutil.copy(MINI / "front.py", disk / "front.py")  # its folder comes before PYTHONPATH
        front = subprocess.Popen(
            [sys.executable, str(disk / "front.py")], env=place.env(False), stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True, start_new_session=True,
        )  # fmt: skip
        assert front.stdout is not None
        url = f"http://127.0.0.1:{front.stdout.readline().strip()}"
        serving = Serving(place, front, url, _ask_mini)
        stack.callback(serving.stop)
        fault_place.unpatched(place, 2)
        yield _scene(stack, place, serving, folder, url, "sglang")


@contextmanager
def vllm_scene(folder: Path, token: str, python: str, size: str = "64m") -> Iterator[Scene]:
    """A real vLLM on CPU, eager, with EAGLE-3; its package is a hard-linked copy, so nothing else sees the patch."""
    with ExitStack() as stack:
        disk = _disk(stack, folder / "disk", size)
        find = "import importlib.util as u; print(u.find_spec('vllm').origin)"
        origin = subprocess.run([python, "-c", find], capture_output=True, text=True, check=True).stdout.strip()
        lib = Path(origin).parents[1] / f".specmeter-faults-{token}"
        stack.callback(shutil.rmtree, lib, ignore_errors=True)
        lib.mkdir(mode=0o700)
        shutil.copytree(Path(origin).parent, lib / "vllm", copy_function=os.link)
        subprocess.run([python, "-m", "compileall", "-q", str(lib / "vllm")], check=False, capture_output=True)
        place = Place(disk, lib, python, ("--python", python, "--engine", "vllm"), VLLM_CHECK, token)
        fault_place.patched_link(place, "serving")
        port = free_port()
        words = [*real_vllm.command(python, folder), "--port", str(port), "--host", "127.0.0.1"]
        env = {**place.env(False), "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "TMPDIR": str(folder)}
        log = stack.enter_context((folder / "server.log").open("w"))
        child = subprocess.Popen(words, env=env, stdout=log, stderr=log, text=True, start_new_session=True, cwd="/")
        url = f"http://127.0.0.1:{port}"
        try:
            until(lambda: child.poll() is not None or real_vllm.healthy(url), "vLLM", 480)
            assert child.poll() is None, (folder / "server.log").read_text()[-3000:]
            asking = _AskVllm(url)
        except BaseException:
            child.kill()
            raise
        serving = Serving(place, child, url, asking, pause_s=1.0)
        stack.callback(serving.stop)
        fault_place.unpatched(place, 2)
        yield _scene(stack, place, serving, folder, url, "vllm")


def _disk(stack: ExitStack, disk: Path, size: str) -> Path:
    if not fault_place.small_disk(disk, size):
        raise PermissionError("no small file system can be mounted here")
    stack.callback(subprocess.run, ["umount", "-l", str(disk)], capture_output=True, check=False)
    for name in ("tmp", "state"):
        (disk / name).mkdir(mode=0o700)
    return disk


def _scene(stack: ExitStack, place: Place, serving: Serving, folder: Path, url: str, engine: str) -> Scene:
    loopback = stack.enter_context(loopback_sshd(folder / "ssh"))
    ssh = stack.enter_context(TcpProxy(loopback.port))
    http = stack.enter_context(TcpProxy(int(url.rpartition(":")[2])))
    (loopback.folder / "config").write_text("")
    loopback.add_host("far", ssh.port)
    return Scene(place, serving, loopback, ssh, http, engine)


def _ask_mini(url: str) -> bool:
    """One request of two pieces; each must have the right sum."""
    answer = httpx.post(f"{url}/v1/chat/completions", json={"max_tokens": 12}, timeout=60, trust_env=False)
    texts = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    pieces = [choice["delta"]["content"] for text in texts for choice in text["choices"]]
    return pieces == ["ok ", "ok "]


class _AskVllm:
    """A greedy request of eight tokens whose text is that of the first one."""

    def __init__(self, url: str) -> None:
        self._text = self._ask(url)

    def __call__(self, url: str) -> bool:
        return self._ask(url) == self._text

    @staticmethod
    def _ask(url: str) -> str:
        body = {"prompt": "One, two, three,", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120, trust_env=False)
        answer.raise_for_status()
        return str(answer.json()["choices"][0]["text"])
