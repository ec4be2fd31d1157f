"""explain's last lines, typed back: each printed command parses, and asks for the run's own setting and one change."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from specmeter.cli import build_parser, main
from specmeter.commands.attention_backends import proposable
from specmeter.commands.explain_commands import PLACE, ServerCommands, commands_for
from specmeter.hosts.dispatch import take_hosts
from specmeter.trace.rundir import load
from tests.support.cost_runs import Law, write_run

OWN = ["--prompts", "my prompts.jsonl", "--kind", "code", "--kind", "chat", "--requests", "7", "--max-tokens", "99",
       "--temperature", "0.5", "--seed", "4", "--honour-eos"]  # fmt: skip
LOAD = {"prompts": "my prompts.jsonl", "kind": ["code", "chat"], "requests": 7, "max_tokens": 99, "temperature": 0.5,
        "seed": 4, "honour_eos": True}  # fmt: skip
ENGINE = {"model": "M", "draft": "D", "threads": 2}
VLLM = ("vllm", "serve", "M", "-tp", "2", "--speculative-config",
        '{"method": "eagle3", "model": "H", "num_speculative_tokens": 5}')  # fmt: skip
SGLANG = ("python", "-m", "sglang.launch_server", "--model-path", "M", "--speculative-algorithm", "EAGLE3",
          "--speculative-draft-model-path", "H", "--speculative-num-steps", "5", "--speculative-eagle-topk", "1",
          "--speculative-num-draft-tokens", "6", "--tp", "8")  # fmt: skip


def typed(command: str) -> argparse.Namespace:
    """The printed line as the command line's own parser reads it."""
    words = shlex.split(command)
    while "=" in words[0]:
        words.pop(0)
    assert words.pop(0) == "specmeter"
    hosts, _, words = take_hosts(words)
    args = build_parser(words[0]).parse_args(words)
    args.hosts = hosts
    return args


def commands(tmp_path: Path, engine: str, *line: str, now: int = 3) -> ServerCommands:
    """Of a run that was made with this command line."""
    changes = {"engine": {"name": engine, "version": "1"}}
    path = write_run(tmp_path / "run", Law(), [0, 3], 2, 15, command=("specmeter", *line), changes=changes)
    return commands_for(load(path), now, {"vllm": ("FLASH_ATTN",), "sglang": ("fa3", "flashinfer")}.get(engine, ()))


def held(args: argparse.Namespace, names: dict[str, Any]) -> dict[str, Any]:
    return {name: getattr(args, name) for name in names}


@pytest.mark.parametrize("line", [["profile", "--steps", "5", "--out", "x"], ["sweep", "--steps", "1-6"], ["demo"]])
def test_the_embedded_engine_keeps_model_load_and_threads(tmp_path: Path, line: list[str]) -> None:
    own = commands(tmp_path, "specmeter", *line, *OWN, "--model", "M", "--draft", "D", "--threads", "2", "--json")
    chain, tree, verify = typed(own.setting(4, 1, 5)), typed(own.setting(3, 4, 8)), typed(own.verify())
    assert held(chain, LOAD) == held(tree, LOAD) == held(verify, LOAD) == LOAD
    assert held(chain, ENGINE) == held(tree, ENGINE) == ENGINE
    assert (chain.command, chain.steps, chain.topk, chain.draft_tokens) == ("profile", 4, 1, None)
    assert (tree.steps, tree.topk, tree.draft_tokens) == (3, 4, 8)
    assert held(verify, ENGINE) == {**ENGINE, "threads": 1} and (verify.steps, verify.topk) == (3, 1)
    off = typed(own.setting(0, 1, 1))
    assert (off.command, off.steps, held(off, LOAD), held(off, ENGINE)) == ("sweep", "3", LOAD, ENGINE)
    assert typed(own.vocabulary()).model == Path("M") and typed(own.vocabulary()).out == Path("small-vocabulary")
    wiring = typed(own.wiring())
    assert (wiring.target, wiring.draft, wiring.threads, wiring.probe) == (Path("M"), Path("D"), 2, True)
    assert all(args.out is None and not args.json for args in (chain, tree, verify, off))


def test_one_thread_is_not_proposed_to_a_run_on_one_thread(tmp_path: Path) -> None:
    own = commands(tmp_path, "specmeter", "profile", "--threads", "1")
    cpus = own.cpus
    assert cpus == 1 or typed(own.verify()).threads == cpus
    assert ServerCommands("embedded", (), own.run, 3, 1).verify() == ""


def test_an_embedded_server_of_the_users_own_command(tmp_path: Path) -> None:
    server = ("specmeter", "serve", "--model", "M", "--threads", "2")
    own = commands(tmp_path, "specmeter", "profile", *OWN, "--", *server)
    args = typed(own.setting(4, 1, 5))
    assert (args.steps, args.server_command, held(args, LOAD)) == (4, list(server), LOAD)
    verify = typed(own.verify())
    assert verify.server_command == [*server[:-2], "--threads", "1"] and verify.steps == 3
    assert typed(own.wiring()).target == Path("M")


def test_a_running_embedded_server_is_asked_again(tmp_path: Path) -> None:
    own = commands(tmp_path, "specmeter", "explain", "--live", "--link", "L", "--url", "http://127.0.0.1:1", *OWN)
    args = typed(own.setting(4, 1, 5))
    assert (args.command, args.link, args.url, args.steps) == ("profile", "L", "http://127.0.0.1:1", 4)
    assert held(args, LOAD) == LOAD
    assert own.verify() == own.vocabulary() == ""  # nothing of a server that runs can be changed by a flag


@pytest.mark.parametrize(("engine", "words"), [("vllm", VLLM), ("sglang", SGLANG)])
def test_other_engines_keep_the_load_and_their_own_flags(tmp_path: Path, engine: str, words: tuple[str, ...]) -> None:
    own = commands(
        tmp_path, engine, "profile", *OWN, "--python", "P", "--baseline", "none", "--steps", "5", "--", *words
    )
    for command, steps in ((own.setting(4, 1, 5), 4), (own.verify(), 3), (own.collectives(), 3)):
        args = typed(command)
        assert held(args, LOAD) == LOAD and (args.python, args.baseline) == (Path("P"), "none")
        assert args.steps is None, "the steps stand in the server's own flags"
        server = args.server_command
        if engine == "vllm":
            config = json.loads(server[server.index("--speculative-config") + 1])
            assert config == {"method": "eagle3", "model": "H", "num_speculative_tokens": steps}
            assert server[:5] == ["vllm", "serve", "M", "-tp", "2"]
        else:
            assert server[server.index("--speculative-num-steps") + 1] == str(steps)
            assert server[server.index("--tp") + 1] == "8" and "H" in server
    assert "--attention-backend" in typed(own.verify()).server_command
    off = typed(own.setting(0, 1, 1))
    assert (off.command, held(off, LOAD)) == ("bench", LOAD)
    assert not [word for word in off.server_command if "speculative" in word]


def test_a_backend_that_runs_already_is_not_proposed() -> None:
    words = (*SGLANG, "--attention-backend", "fa3")
    proposed = typed(ServerCommands("sglang", words, backends=("fa3", "flashinfer")).verify()).server_command
    assert proposed.count("--attention-backend") == 1 and "fa3" not in proposed
    assert ServerCommands("vllm", (*VLLM, "--async-scheduling")).host() == ""


CPU = "class P:\n    def get_attn_backend_cls(cls, chosen):\n        return AttentionBackendEnum.CPU_ATTN.get_path()\n"
CUDA = (
    "def _get_backend_priorities(mla):\n    return [AttentionBackendEnum.FLASHINFER, AttentionBackendEnum.FLASH_ATTN]\n"
)


@pytest.mark.parametrize(
    ("torch", "flag", "proposed", "reason"),
    [
        ("2.13.0", "attention_backend", ("FLASH_ATTN", "FLASHINFER"), ""),
        ("2.13.0+cu130", "attention_backend", ("FLASH_ATTN", "FLASHINFER"), ""),
        ("2.13.0+cpu", "attention_backend", (), "vllm on cpu admits none of FLASH_ATTN, FLASHINFER (it has CPU_ATTN)"),
        ("2.13.0", "other", (), "this version of vllm has no --attention-backend"),
        ("", "attention_backend", (), "what platform vllm was built for is not known"),
    ],
)
def test_backends_are_those_of_the_engines_platform(
    tmp_path: Path, torch: str, flag: str, proposed: tuple[str, ...], reason: str
) -> None:
    site = tmp_path / "site"
    texts = {
        "platforms/cpu": CPU,
        "platforms/cuda": CUDA,
        "engine/arg_utils": f"class EngineArgs:\n    {flag}: str\n    x: int\n",
    }
    for name, text in texts.items():
        file = site / "vllm" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        for folder in (file.parent, site / "vllm"):
            (folder / "__init__.py").write_text("raise SystemExit('imported')")
        file.write_text(text)
    if torch:
        (site / f"torch-{torch}.dist-info").mkdir()
        (site / f"torch-{torch}.dist-info" / "METADATA").write_text(f"Version: {torch}\n")
    run = write_run(tmp_path / "run", Law(), [0, 3], 2, 15)
    points = [{"name": "cycle", "module": "vllm.engine.arg_utils", "path": str(site / "vllm/engine/arg_utils.py")}]
    (run / "plan.json").write_text(json.dumps({"engine": "vllm", "points": points}))
    found, why = proposable(load(run), "vllm")
    assert found == proposed and reason in why and bool(why) == (not proposed)


def test_no_backend_is_proposed_that_nobody_could_look_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = {"engine": {"name": "vllm", "version": "1"}}
    line = ("specmeter", "profile", "--", *VLLM)
    path = write_run(tmp_path / "run", Law(), [0, 3], command=line, changes=changes)
    assert main(["explain", "--json", str(path)]) == 0
    found = json.loads(capsys.readouterr().out)["result"]
    assert not [action for action in found["actions"] if "--attention-backend" in action["command"]]
    assert [line for line in found["assumptions"] if "the source of vllm that ran is not on this machine" in line]


def test_a_server_file_is_named_again(tmp_path: Path) -> None:
    file = tmp_path / "servers.toml"
    file.write_text(f'[server.a]\ncommand = {json.dumps(list(VLLM))}\nenv = {{ NCCL_P2P_LEVEL = "SYS" }}\n')
    own = commands(tmp_path, "vllm", "profile", *OWN, "--server", f"{file}:a")
    args = typed(own.setting(4, 1, 5))
    assert (args.server, args.steps, args.server_command, held(args, LOAD)) == (f"{file}:a", 4, [], LOAD)
    assert typed(own.setting(0, 1, 1)).server == f"{file}:a"
    verify = typed(own.verify())
    assert verify.server is None and verify.server_command[:4] == ["env", "NCCL_P2P_LEVEL=SYS", "vllm", "serve"]
    wiring = typed(own.wiring())
    assert (wiring.target, wiring.draft) == (Path("M"), Path("H"))
    file.unlink()
    assert PLACE in own.verify() and "TARGET-DIR" in own.wiring()


def test_hosts_are_named_again(tmp_path: Path) -> None:
    own = commands(tmp_path, "specmeter", "--on", "ssh://gpu", "profile", "--steps", "3", "--threads", "2")
    args = typed(own.setting(4, 1, 5))
    assert (args.hosts, args.steps, args.threads) == (["ssh://gpu"], 4, 2)


def test_a_command_line_that_cannot_be_read_again_gives_plain_commands(tmp_path: Path) -> None:
    own = commands(tmp_path, "specmeter", "profile", "--of-another-version", "7")
    assert own.setting(4, 1, 5) == "specmeter profile --steps 4"


def test_two_runs_of_different_servers_are_refused_unless_pooled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = write_run(tmp_path / "two", Law(), [0, 2], command=("specmeter", "profile", "--steps", "2"))
    others: dict[str, dict[str, Any]] = {
        "threads: the default in": {"command": ("specmeter", "profile", "--steps", "5", "--threads", "1")},
        "model: the default in": {"command": ("specmeter", "profile", "--model", "M", "--steps", "5")},
        "temperature: 0.0 in": {"command": ("specmeter", "profile", "--temperature", "1")},
        "engine version: 0.1.0 in": {"changes": {"engine": {"name": "specmeter", "version": "0.2.0"}}},
        "engine: specmeter in": {"changes": {"engine": {"name": "vllm"}}},
        "prompts: built-in in": {"prompt_set": "mine.jsonl"},
        "host: h in": {"host": "other"},
        "processors: ": {"machine": {"cpus": 192}},
    }
    for number, (said, how) in enumerate(others.items()):
        other = write_run(tmp_path / f"other-{number}", Law(), [0, 5], **how)
        assert main(["explain", str(base), str(other)]) == 2
        error = capsys.readouterr().err
        assert said in error and "--pool" in error and str(other) in error, said
        assert main(["explain", "--json", "--pool", str(base), str(other)]) == 0
        warnings = json.loads(capsys.readouterr().out)["warnings"]
        assert any("pooled although they differ" in line and said in line for line in warnings)


@pytest.mark.parametrize("named", [["--link", "L", "--url", "http://127.0.0.1:1"], ["--url", "http://127.0.0.1:1"]])
def test_what_a_run_of_a_running_server_does_not_tell_is_said_and_no_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], named: list[str]
) -> None:
    own = write_run(tmp_path / "p1", Law(), [0, 2], command=("specmeter", "profile", "--steps", "2", "--threads", "1"))
    linked = write_run(tmp_path / "linked", Law(), [0, 5], command=("specmeter", "profile", *named))
    assert main(["explain", "--json", str(own), str(linked)]) == 0
    (warning,) = json.loads(capsys.readouterr().out)["warnings"]
    assert "threads of the server are not known" in warning and str(linked) in warning
    assert main(["explain", "--json", str(own)]) == 0
    assert json.loads(capsys.readouterr().out)["warnings"] == []


def test_two_baselines_that_differ_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two = write_run(tmp_path / "two", Law(), [0, 2])
    slow = write_run(tmp_path / "five", Law(verify=12.0), [0, 5], seed=1)
    alike = write_run(tmp_path / "alike", Law(verify=10.2), [0, 5], seed=1)
    assert main(["explain", str(two), str(slow)]) == 2
    assert "baseline step" in capsys.readouterr().err
    assert main(["explain", str(two), str(alike)]) == 0, "equal starts differ by as much"


def test_other_steps_of_one_vllm_command_are_one_measurement(tmp_path: Path) -> None:
    runs = []
    for steps, port in ((2, "1"), (5, "2")):
        config = json.dumps({"method": "eagle3", "model": "H", "num_speculative_tokens": steps})
        line = ("specmeter", "profile", "--", "vllm", "serve", "M", "--port", port, "--speculative-config", config)
        how: dict[str, Any] = {"changes": {"engine": {"name": "vllm", "version": "1"}}, "command": line}
        runs.append(str(write_run(tmp_path / str(steps), Law(), [0, steps], **how)))
    assert main(["explain", *runs]) == 0
