"""How long `specmeter serve` takes until it answers, from the model in the cache, and the memory it takes.

    python benchmarks/serve_start.py --starts 7

Each start is a fresh process; ready is the first 200 of /health after exec, polled every 10 ms. Memory is read from
/proc after one request of 128 tokens: VmHWM is the peak, VmRSS what stays.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import httpx

from specmeter.eagle.model_store import ensure_model
from specmeter.engines.process import free_port


def main() -> None:
    """Start, wait, ask, read, stop; print a line a start and the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=7)
    options = parser.parse_args()
    ensure_model()
    found = [one_start() for _ in range(options.starts)]
    for ready, peak, stays in found:
        print(f"ready {ready:.2f} s, peak {peak:.0f} MB, resident {stays:.0f} MB")
    times, peaks, resident = zip(*found, strict=True)
    print(
        f"median of {len(found)}: ready {statistics.median(times):.2f} s ({min(times):.2f}-{max(times):.2f}), "
        f"peak {statistics.median(peaks):.0f} MB, resident {statistics.median(resident):.0f} MB; "
        f"{os.cpu_count()} cores {platform.machine()}, load {os.getloadavg()[0]:.1f}, {time.strftime('%Y-%m-%d %H:%M')}"
    )


def one_start() -> tuple[float, float, float]:
    """Seconds until ready, peak and resident memory in MB."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    begin = time.perf_counter()
    command = [sys.executable, "-m", "specmeter", "serve", "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            while not healthy(url):
                if server.poll() is not None:
                    sys.exit("the server ended before it was ready")
                time.sleep(0.01)
            ready = time.perf_counter() - begin
            body = {"prompt": "The capital of France is", "max_tokens": 128, "temperature": 0, "model": "m"}
            model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
            httpx.post(f"{url}/v1/completions", json={**body, "model": model}, timeout=120).raise_for_status()
            status = Path(f"/proc/{server.pid}/status").read_text()
        finally:
            server.terminate()
    sizes = {line.split(":")[0]: line.split()[1] for line in status.splitlines() if line.startswith("Vm")}
    return ready, int(sizes["VmHWM"]) / 1024, int(sizes["VmRSS"]) / 1024


def healthy(url: str) -> bool:
    """Whether the server answers."""
    try:
        return httpx.get(f"{url}/health", timeout=1).status_code == 200
    except httpx.TransportError:
        return False


if __name__ == "__main__":
    main()
