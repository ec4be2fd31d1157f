"""Settings, command lines, metrics and the server grammar."""

from __future__ import annotations

import argparse
import json
import socket
import sys
from pathlib import Path

import httpx
import pytest

from specmeter.cli import main
from specmeter.engines import Counters, Server, ServerSpec, Setting, engine_named, refuse_silent
from specmeter.engines.access import key_headers, listening_host, shown_url, url_of
from specmeter.engines.flags import flag_value, with_flag, with_switch, without_flags
from specmeter.engines.prometheus import Metrics
from specmeter.engines.spec import add_server_arguments, checked_url, engine_of, read_server_file, server_spec
from specmeter.errors import SpecmeterError

VLLM = (
    "vllm",
    "serve",
    "M",
    "--port",
    "9",
    "--speculative-config",
    '{"method": "eagle3", "num_speculative_tokens": 3}',
)
SGLANG = (
    "python", "-m", "sglang.launch_server", "--model-path", "M", "--speculative-algorithm", "EAGLE3",
    "--speculative-num-steps=5", "--speculative-eagle-topk", "8", "--speculative-num-draft-tokens", "32", "--tp", "8",
)  # fmt: skip


@pytest.mark.parametrize(
    ("steps", "topk", "tokens"), [(-1, 1, None), (3, 0, None), (3, 1, 3), (3, 1, 5), (2, 4, 1), (2, 4, 22)]
)
def test_settings_out_of_range(steps: int, topk: int, tokens: int | None) -> None:
    with pytest.raises(SpecmeterError):
        Setting.of(steps, topk, tokens)


def test_settings_and_labels() -> None:
    assert Setting.of(0).label == "baseline" and Setting.of(0, 4, 9) == Setting.of(0)
    assert Setting.of(3).draft_tokens == 4 and Setting.of(3).label == "k=3" and Setting.of(3).draft_count == 3
    assert Setting.of(2, 4, 21).draft_tokens == 21


def test_vllm_baseline_is_the_same_command_without_speculation() -> None:
    engine = engine_named("vllm")
    assert engine.with_setting(VLLM, Setting.of(0)) == ("vllm", "serve", "M", "--port", "9")
    changed = engine.with_setting(VLLM, Setting.of(5))
    assert json.loads(str(flag_value(changed, "--speculative-config"))) == {
        "method": "eagle3",
        "num_speculative_tokens": 5,
    }
    assert engine.setting_of(VLLM) == Setting.of(3) and engine.setting_of(VLLM[:3]) == Setting.of(0)
    with pytest.raises(SpecmeterError, match="chains only"):
        engine.with_setting(VLLM, Setting.of(2, 4, 9))
    with pytest.raises(SpecmeterError, match="no --speculative-config"):
        engine.with_setting(VLLM[:3], Setting.of(2))


def test_vllm_dotted_flags_and_default_host() -> None:
    engine = engine_named("vllm")
    dotted = ("vllm", "serve", "M", "--speculative-config.num_speculative_tokens", "4", "--seed", "1")
    assert engine.setting_of(dotted) == Setting.of(4)
    assert engine.with_setting(dotted, Setting.of(0)) == ("vllm", "serve", "M", "--seed", "1")
    assert flag_value(engine.with_port(dotted, 5), "--host") == "127.0.0.1"


def test_vllm_start_that_can_be_switched_names_every_step_count_in_its_table() -> None:
    engine = engine_named("vllm")
    assert engine.can("switch") and not engine.can("per_request")
    command = engine.switched(VLLM, [Setting.of(k) for k in (0, 2, 5, 1)])
    config = json.loads(str(flag_value(command, "--speculative-config")))
    assert config["method"] == "eagle3" and config["num_speculative_tokens"] == 5
    assert config["num_speculative_tokens_per_batch_size"] == [[1, 1, 5], [2, 2, 2], [3, 3, 1], [4, 1 << 20, 0]]
    assert command[:5] == VLLM[:5]
    with pytest.raises(SpecmeterError, match="chains only"):
        engine.switched(VLLM, [Setting.of(2, 4, 9)])
    with pytest.raises(SpecmeterError, match="no step count"):
        engine.switched(VLLM, [Setting.of(0)])
    with pytest.raises(SpecmeterError, match="of its own"):
        engine.switched(command, [Setting.of(2)])


def test_sglang_start_that_can_be_switched_has_every_candidate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    engine = engine_named("sglang")
    assert engine.can("switch") and not engine.can("per_request")
    command = engine.switched((*SGLANG, "--tp", "1"), [Setting.of(k) for k in (3, 0, 5)])
    assert "--speculative-adaptive" in command
    assert engine.setting_of(command) == Setting.of(5), "unturned it is the largest"
    config = Path(str(flag_value(command, "--speculative-adaptive-config")))
    assert config.stat().st_mode & 0o777 == 0o600 and config.parent.stat().st_mode & 0o777 == 0o700
    [(batch, slot)] = json.loads(config.read_text()).items()
    assert (batch, slot["candidate_steps"]) == ("1", [0, 3, 5]), "one slot, so that it holds for every batch size"
    assert slot["warmup_batches"] > 1e15, "SGLang's own average never changes the number"
    assert engine.switched((*SGLANG, "--tp", "1"), [Setting.of(k) for k in (5, 3, 0)])[-1] == str(config)


@pytest.mark.parametrize(
    ("more", "settings", "why"),
    [
        (("--tp", "1"), [Setting.of(2, 4, 9)], "a tree cannot be switched to"),
        (("--tp", "1"), [Setting.of(0)], "no step count"),
        ((), [Setting.of(2)], "ranks keeps a step count of its own"),
        (("--tp", "1", "--pp-size=2"), [Setting.of(2)], "ranks keeps a step count of its own"),
        (("--tp", "1", "--speculative-adaptive-config", "F"), [Setting.of(2)], "config of its own"),
    ],
)
def test_sglang_starts_that_cannot_be_switched_say_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...], settings: list[Setting], why: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(SpecmeterError, match=why):
        engine_named("sglang").switched((*SGLANG, *more), settings)
    assert list(tmp_path.iterdir()) == []


def test_an_adaptive_config_that_cannot_be_written_is_an_error_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(SpecmeterError, match="cannot be written"):
        engine_named("sglang").switched((*SGLANG, "--tp", "1"), [Setting.of(2)])


def test_sglang_flags() -> None:
    engine = engine_named("sglang")
    assert engine.setting_of(SGLANG) == Setting.of(5, 8, 32)
    assert engine.with_setting(SGLANG, Setting.of(0)) == (*SGLANG[:5], "--tp", "8")
    assert engine.setting_of(engine.with_setting(SGLANG, Setting.of(2))) == Setting.of(2)


def test_embedded_takes_settings_with_the_request() -> None:
    engine = engine_named("embedded")
    assert engine.can("per_request") and engine.can("no_spec") and not engine.can("switch")
    assert engine.request_body(Setting.of(0)) == {"speculative_num_steps": 0}
    command = ("specmeter", "serve", "--speculative-num-steps", "3")
    assert engine.setting_of(command) == Setting.of(3)
    assert engine.setting_of(engine.with_setting(command, Setting.of(0))) == Setting.of(0)


def test_flags_with_many_values() -> None:
    assert without_flags(("a", "--sizes", "1", "2", "--x", "y"), ("--sizes",)) == ("a", "--x", "y")
    # A short flag is no value of the flag before it; a negative number is.
    assert without_flags(("a", "--port", "1", "-tp", "2"), ("--port",)) == ("a", "-tp", "2")
    assert without_flags(("a", "--port", "-1", "-2", "--x"), ("--port",)) == ("a", "--x")
    assert flag_value(("a", "--tp_size=2", "--tp-size", "4"), "--tp-size") == "4"


def test_a_model_behind_a_flag_stays_in_the_command() -> None:
    engine = engine_named("vllm")
    config = '{"method": "eagle3", "num_speculative_tokens": 3}'
    words = ("vllm", "serve", "--seed", "1", "--speculative-config", config, "meta-llama/X")
    assert engine.with_setting(words, Setting.of(0)) == ("vllm", "serve", "--seed", "1", "meta-llama/X")
    assert engine.with_setting(words, Setting.of(2))[:5] == ("vllm", "serve", "--seed", "1", "meta-llama/X")
    dotted = ("vllm", "serve", "--speculative-config.method", "eagle3", "meta-llama/X")
    assert engine.with_setting(dotted, Setting.of(0)) == ("vllm", "serve", "meta-llama/X")
    assert with_flag(("vllm", "serve", "--port", "0", "M"), "--port", "9") == ("vllm", "serve", "M", "--port", "9")
    assert with_switch(("vllm", "serve", "--enforce_eager", "M"), "--enforce-eager") == (
        "vllm", "serve", "M", "--enforce-eager",
    )  # fmt: skip
    names = ("vllm", "serve", "M", "--served-model-name", "a", "b", "--seed", "1")
    assert without_flags(names, ("--served-model-name",)) == ("vllm", "serve", "M", "--seed", "1")
    sglang = ("sglang", "serve", "--speculative-adaptive", "M", "--speculative-num-steps", "3", "N")
    assert engine_named("sglang").with_setting(sglang, Setting.of(0)) == ("sglang", "serve", "M", "N")


def test_vllm_metrics_and_differences() -> None:
    text = """# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="a \\"b\\", c"} 100.0
vllm:spec_decode_num_draft_tokens_total{engine="0"} 300.0
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 90.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 30.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 60.0
vllm:generation_tokens_total NaN
rubbish {
"""
    counted = engine_named("vllm").counters(text, {})
    assert counted == Counters(100, 300, 90, None, (60, 30))
    assert counted.mean_accept_length == pytest.approx(1.9)
    assert counted.since(Counters(50, 150, 40, None, (25,))) == Counters(50, 150, 50, None, (35, 30))
    assert Metrics("").total("x") is None


def test_sglang_gauge_from_metrics_or_info() -> None:
    engine = engine_named("sglang")
    assert engine.counters('sglang:spec_accept_length{tp="0"} 2.5', {}).mean_accept_length == 2.5
    info = {"internal_states": [{"avg_spec_accept_length": 3.25}]}
    assert engine.counters("", info).mean_accept_length == 3.25
    assert engine.counters("", {}).mean_accept_length is None
    for senseless in (10**400, -1, float("nan")):
        assert engine.counters("", {"internal_states": [{"avg_spec_accept_length": senseless}]}) == Counters()


def test_sglang_accept_length_between_two_scrapes() -> None:
    def scrape(generated: int, cycles: int, requests: int) -> Counters:
        text = (
            f'sglang:generation_tokens_total{{model_name="m"}} {generated}\n'
            f'sglang:spec_verify_calls_total{{model_name="m"}} {cycles}\n'
            f'sglang:num_requests_total{{model_name="m"}} {requests}\n'
            'sglang:spec_accept_length{model_name="m"} 1.0\n'
        )
        return engine_named("sglang").counters(text, {})

    counted = scrape(1000 + 4 * 91, 300 + 4 * 30, 10 + 4).since(scrape(1000, 300, 10))
    assert (counted.cycles, counted.finished, counted.mean_accept_length) == (120, 4, 3.0)
    assert scrape(9, 3, 1).since(scrape(9, 3, 1)).mean_accept_length is None, "nothing ran"
    before = engine_named("sglang").counters("sglang:generation_tokens_total 5\nsglang:num_requests_total 1", {})
    assert before.since(before).mean_accept_length is None, "a version without the counter of cycles"


def test_senseless_metrics_are_skipped() -> None:
    metrics = Metrics(f'a 1e308\na{{x="1"}} 1e308\nb{{position="\u00b2"}} 3\nb{{position="{"1" * 5000}"}} 3\nb 2')
    assert metrics.total("a") is None and metrics.by_position("b") == () and metrics.total("b") == 8


@pytest.mark.parametrize(
    ("command", "engine"),
    [
        (["/opt/v/bin/vllm", "serve", "M"], "vllm"),
        (["python3", "-m", "vllm.entrypoints.openai.api_server"], "vllm"),
        (["python", "-m", "sglang.launch_server"], "sglang"),
        (["/x/python", "-m", "specmeter", "serve"], "embedded"),
    ],
)
def test_engine_of_a_command(command: list[str], engine: str) -> None:
    assert engine_of(command) == engine


def test_unclear_commands_and_urls_are_refused() -> None:
    with pytest.raises(SpecmeterError, match="not plain which engine"):
        engine_of(["./start.sh"])
    assert checked_url("127.0.0.1:80/v1/") == "http://127.0.0.1:80"
    for wrong in ("", "ftp://x", "http://", "http://x:99999999"):
        with pytest.raises(SpecmeterError):
            checked_url(wrong)


def _parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_server_arguments(parser)
    return parser.parse_args(words)


def test_one_server_is_named_in_one_way() -> None:
    assert server_spec(_parsed("--", "vllm", "serve", "M")).command == ("vllm", "serve", "M")
    assert server_spec(_parsed("--url", "h:1", "--link", "x")).link == "x"
    with pytest.raises(SpecmeterError, match="More than one server"):
        server_spec(_parsed("--url", "h:1", "--", "vllm", "serve"))
    with pytest.raises(SpecmeterError, match="No server is named"):
        server_spec(_parsed())


def test_secrets_of_commands_and_addresses_are_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SpecmeterError) as caught:
        engine_of(["env", "HF_TOKEN=hf_abcdefghij", "./start.sh"])
    assert "hf_abcdefghij" not in str(caught.value) and "HF_TOKEN" in str(caught.value)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://me:hush@127.0.0.1:{closed.getsockname()[1]}"
        server = Server(url)
        with pytest.raises(SpecmeterError, match="was not healthy") as unhealthy:
            server.wait_healthy(0.0)
        with pytest.raises(SpecmeterError, match="Nothing answers") as silent:
            refuse_silent(server)
    with pytest.raises(SpecmeterError, match="Not a server's URL") as wrong:
        checked_url("me:hush@ho st")
    for error in (unhealthy, silent, wrong):
        assert "hush" not in str(error.value) and "me" not in error.value.what.split("@")[0].split("//")[-1]


@pytest.mark.parametrize(
    "url",
    [
        "http://me:hu/sh@host:1",  # the password's / ends the authority, so this is no address
        "http://me:hu?sh@host",
        "me:hu/sh@http://host",
        "http://ho st/v1?key=hu/sh",
        "http://ho st/#hu/sh",
        "ftp://h/hf_abcdefghijkl",
        "http://ho st/bearer hf_abcdefghijkl",
    ],
)
def test_what_is_no_address_is_not_printed_with_what_may_be_a_secret(url: str) -> None:
    with pytest.raises(SpecmeterError, match="Not a server's URL") as wrong:
        checked_url(url)
    said = str(wrong.value)
    assert "sh@" not in said and "key=hu" not in said and "#" not in said and "abcdefghijkl" not in said, said
    assert shown_url("http://127.0.0.1:8000/v1") == "http://127.0.0.1:8000/v1"


def test_a_key_comes_from_a_variable_or_from_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "k-1")
    spec = server_spec(_parsed("--url", "h:1", "--api-key-env", "MY_KEY"))
    assert key_headers(spec) == {"Authorization": "Bearer k-1"} and "k-1" not in repr(spec)
    own = server_spec(_parsed("--", "vllm", "serve", "M", "--api-key", "k-2"))
    assert key_headers(own) == {"Authorization": "Bearer k-2"}
    monkeypatch.setenv("MY_KEY", "k\n1")
    with pytest.raises(SpecmeterError, match="MY_KEY, and it holds no key"):
        server_spec(_parsed("--url", "h:1", "--api-key-env", "MY_KEY"))


@pytest.mark.parametrize(
    ("health", "models", "healthy"), [(200, 500, True), (404, 200, True), (404, 404, False), (503, 200, False)]
)
def test_a_server_without_health_is_ready_once_it_lists_its_models(health: int, models: int, healthy: bool) -> None:
    codes = {"/health": health, "/v1/models": models}
    answers = httpx.MockTransport(lambda request: httpx.Response(codes[request.url.path]))
    with Server("http://127.0.0.1", transport=answers) as server:
        assert server.healthy() is healthy


PLAIN_SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/v1/models" else 404)
        self.end_headers()
    def log_message(self, *words): pass
words = sys.argv
place = words[words.index("--host") + 1], int(words[words.index("--port") + 1])
http.server.HTTPServer(place, Handler).serve_forever()
"""


def test_a_server_at_its_own_host_and_at_any_port_is_found(tmp_path: Path) -> None:
    command = (sys.executable, "-c", PLAIN_SERVER, "--host", "127.0.0.2", "--port", "0")
    with Server.start(engine_named("vllm"), ServerSpec("vllm", command), tmp_path / "log", timeout_s=60.0) as server:
        assert server.url.startswith("http://127.0.0.2:") and not server.url.endswith(":0")


def test_where_a_server_is_asked() -> None:
    hosts = {"10.1.2.3": "10.1.2.3", "0.0.0.0": "127.0.0.1", "::": "::1", "localhost": "localhost"}
    assert {host: listening_host(("vllm", "serve", "M", "--host", host)) for host in hosts} == hosts
    assert listening_host(("vllm", "serve", "M")) == "127.0.0.1"
    assert url_of("::1", 8) == "http://[::1]:8" and url_of("10.1.2.3", 8) == "http://10.1.2.3:8"


def test_server_files(tmp_path: Path) -> None:
    path = tmp_path / "servers.toml"
    path.write_text('[server.a]\ncommand = ["vllm", "serve", "M"]\nenv = {X = 1}\n[server.b]\nurl = "http://h:1"\n')
    assert read_server_file(f"{path}:a").env == {"X": "1"} and read_server_file(f"{path}:b").url == "http://h:1"
    for text, reason in (
        ("[server.a]\n", "either a command or a url"),
        ("x = 1\n", "no \\[server.NAME\\]"),
        ("[server\n", "not valid TOML"),
        ('[server.a]\nurl = "http://h"\ncolour = 1\n', "unknown keys: colour"),
        ('[server.a]\nurl = "http://h"\napi_key_env = 5\n', "api_key_env is 5, which is no text"),
        ('[server.a]\ncommand = "vllm serve"\n', "list of strings"),
    ):
        path.write_text(text)
        with pytest.raises(SpecmeterError, match=reason):
            read_server_file(str(path))


def test_a_url_that_no_one_answers_names_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        for url, code, said in (
            (f"http://127.0.0.1:{closed.getsockname()[1]}", 4, "Connection refused"),
            ("notaurl.invalid", 4, "Nothing answers at http://notaurl.invalid"),
            ("not a url", 2, "Not a server's URL: not a url"),
            ("http://[x", 2, "Not a server's URL"),
            ("http://" + "a" * 300, 2, "Not a server's URL"),
            ("http://a..b", 2, "Not a server's URL"),
        ):
            assert main(["profile", "--url", url, "--out", str(out)]) == code, url
            shown = capsys.readouterr().err
            assert said in shown and "probes" not in shown, shown
    assert not out.exists()


@pytest.mark.parametrize("port", ["²", "٣", "", "x", "-1", "0", "9" * 5000])
@pytest.mark.parametrize("name", ["vllm", "sglang", "embedded"])
def test_a_port_or_a_step_count_that_is_no_number_is_none_known(name: str, port: str) -> None:
    engine = engine_named(name)
    assert engine.command_port(("serve", "--port", port)) is None
    assert (
        engine.command_port(
            (
                "serve",
                "--port=8000",
            )
        )
        == 8000
    )
    if name != "vllm" and port not in ("-1", "0"):
        speculative = ("serve", "--speculative-algorithm", "EAGLE3", "--speculative-num-steps", port)
        assert engine.setting_of(speculative) is None
