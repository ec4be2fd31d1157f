"""Arms from words and files, and what a server made of its arguments."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from specmeter.bench.arms import arms_from_file, arms_from_words, masked_line
from specmeter.bench.comparing import ComparePlan, other_models
from specmeter.bench.prompts import Prompt
from specmeter.bench.resolved import command_flags, differences, logged_arguments
from specmeter.bench.schedule import Sending
from specmeter.engines import ServerSpec, Setting
from specmeter.errors import SpecmeterError

VLLM = ServerSpec("vllm", ("vllm", "serve", "M", "--speculative-config", '{"method": "eagle3", "model": "H"}'))
SGLANG = ServerSpec(
    "sglang",
    ("python", "-m", "sglang.launch_server", "--model-path", "M", "--speculative-algorithm", "EAGLE3",
     "--speculative-draft-model-path", "H"),
)  # fmt: skip
EMBEDDED = ServerSpec("embedded", ("specmeter", "serve", "--threads", "1"))
PROMPT = Prompt("p", "chat", (("user", "hello"),))


def test_words_become_commands_and_variables() -> None:
    base, fast = arms_from_words(["baseline", "fast:k=3,NCCL_ALGO=Tree,--attention-backend=X,--eager"], VLLM)
    assert base.spec.command == ("vllm", "serve", "M") and base.setting == Setting.of(0)
    assert '"num_speculative_tokens": 3' in fast.spec.command[-1] and fast.spec.env == {"NCCL_ALGO": "Tree"}
    assert fast.name == "fast" and {"--eager", "--attention-backend"} <= set(fast.spec.command)


def test_a_tree_has_its_size() -> None:
    tree, _ = arms_from_words(["k=4,topk=4,tokens=12", "server"], EMBEDDED)
    assert tree.setting == Setting.of(4, 4, 12) and tree.spec.command[-1] == "12"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["k=2"], "two arms"),
        (["k=2", "k=2"], "named k=2"),
        (["k=two", "baseline"], "no setting"),
        (["topk=4", "baseline"], "steps"),
        (["k=1,lower=3", "baseline"], "no setting"),
    ],
)
def test_bad_words_are_refused(words: list[str], said: str) -> None:
    with pytest.raises(SpecmeterError) as caught:
        arms_from_words(words, EMBEDDED)
    assert said in str(caught.value)


def test_arms_of_a_running_server_are_refused() -> None:
    with pytest.raises(SpecmeterError, match="command"):
        arms_from_words(["baseline", "k=2"], ServerSpec("embedded", url="http://127.0.0.1:1"))


def test_a_file_of_servers(tmp_path: Path) -> None:
    file = tmp_path / "arms.toml"
    file.write_text(
        '[server.a]\ncommand = ["specmeter", "serve"]\nsettings = { steps = 0 }\n'
        '[server.b]\nurl = "http://127.0.0.1:9"\n'
    )
    a, b = arms_from_file(file)
    assert (a.name, a.setting, b.spec.url) == ("a", Setting.of(0), "http://127.0.0.1:9")
    file.write_text('[server.a]\ncommand = ["specmeter", "serve"]\nsettings = { speed = 9 }\n[server.b]\nurl = "u:1"\n')
    with pytest.raises(SpecmeterError, match="no setting"):
        arms_from_file(file)


def test_order_holds_every_arm_once_a_round_and_comes_from_the_seed() -> None:
    arms = arms_from_words(["baseline", "k=1", "k=2"], EMBEDDED)
    orders = [
        [one[0].name for one in ComparePlan(arms, (PROMPT,), 2, Sending(8, seed=seed), starts=4).order()]
        for seed in range(8)
    ]
    assert all(set(o[i : i + 3]) == {"baseline", "k=1", "k=2"} for o in orders for i in range(0, 12, 3))
    assert len({tuple(o) for o in orders}) > 1 and orders[0] == [
        one[0].name for one in ComparePlan(arms, (PROMPT,), 2, Sending(8, seed=0), starts=4).order()
    ]


def test_together_refuses_arms_that_need_their_own_start() -> None:
    arms = arms_from_words(["baseline", "k=2,--threads=2"], EMBEDDED)
    with pytest.raises(SpecmeterError, match="differ in more"):
        ComparePlan(arms, (PROMPT,), 2, Sending(8), together=True)
    with pytest.raises(SpecmeterError, match="travel with a request or can be switched"):
        arms = arms_from_words(["baseline", "k=2"], SGLANG)
        unknown = tuple(replace(arm, spec=replace(arm.spec, engine=None)) for arm in arms)
        ComparePlan(unknown, (PROMPT,), 2, Sending(8), together=True)


def test_logged_arguments_of_both_engines() -> None:
    vllm = (
        "INFO core.py:105] Initializing a V1 LLM engine (v0.32.0) with config: model='M', "
        "speculative_config=SpeculativeConfig(method='eagle3', num_spec_tokens=3), dtype=torch.bfloat16, sizes=[1, 2]"
    )
    found = logged_arguments(vllm)
    assert found["model"] == "M" and found["sizes"] == "[1, 2]"
    assert found["speculative_config"] == "SpeculativeConfig(method='eagle3', num_spec_tokens=3)"
    sglang = "[2026] server_args=ServerArgs(model_path='a, b', max_running_requests=48, enable_mixed_chunk=False)"
    assert logged_arguments(sglang) == {
        "model_path": "a, b", "max_running_requests": "48", "enable_mixed_chunk": "False",
    }  # fmt: skip
    assert logged_arguments("nothing of the kind") == {}


def test_differences_name_what_the_engine_changed_by_itself() -> None:
    sides = {"plain": {"max_running_requests": "2048", "x": "1"}, "eagle": {"max_running_requests": "48", "x": "1"}}
    (row,) = differences(sides)
    assert row == {"argument": "max_running_requests", "values": {"plain": "2048", "eagle": "48"}}
    assert command_flags(("m", "--a", "1", "2", "--b=3", "--c")) == {"a": "1 2", "b": "3", "c": "on"}
    words = ("python", "-m", "e", "--dtype", "half", "-tp", "8", "--bias", "-1", "-q")
    assert command_flags(words) == {"dtype": "half", "tp": "8", "bias": "-1", "q": "on"}


@pytest.mark.parametrize(
    "words", ["k=2,VLLM_API_KEY=s3cr3t", "k=2,--api-key=s3cr3t", "k=2,--url=http://me:s3cr3t@h/", "HF_TOKEN=s3cr3t,k=2"]
)
def test_no_secret_of_an_arms_words_is_told(words: str) -> None:
    arm, _ = arms_from_words([words, "baseline"], VLLM)
    assert "s3cr3t" not in f"{arm.name} {arm.facts()}" and "k=2" in arm.name
    assert "s3cr3t" in f"{arm.spec.command} {arm.spec.env}", "the server still gets it"
    line = masked_line(["compare", "--arm", words, f"--arm={words}", "--arm", "k=2,X=1"], [words, "k=2,X=1"])
    assert "s3cr3t" not in str(line) and line[-1] == "k=2,X=1"
    with pytest.raises(SpecmeterError) as caught:
        arms_from_words([f"{words},what", "baseline"], VLLM)
    assert "s3cr3t" not in str(caught.value)


@pytest.mark.parametrize("url", ["http://me:s3cr3t@127.0.0.1:9/x", "http://s3cr3t@127.0.0.1:9/x"])
def test_no_secret_of_an_address_is_told(tmp_path: Path, url: str) -> None:
    file = tmp_path / "arms.toml"
    file.write_text(f'[server.a]\nurl = "{url}"\n[server.b]\nurl = "http://127.0.0.1:9"\n')
    a, b = arms_from_file(file)
    assert (a.facts()["url"], b.facts()["url"]) == ("http://***@127.0.0.1:9/x", "http://127.0.0.1:9")
    assert a.spec.url == url


@pytest.mark.parametrize("wrong", ["url = 8000", "url = ['a']", 'url = "h:1"\nlink = 5', 'url = "h:1"\nengine = 5'])
def test_a_value_of_another_type_is_named(tmp_path: Path, wrong: str) -> None:
    file = tmp_path / "arms.toml"
    file.write_text(f'[server.a]\n{wrong}\n[server.b]\nurl = "http://127.0.0.1:9"\n')
    with pytest.raises(SpecmeterError, match="is no text") as caught:
        arms_from_file(file)
    assert caught.value.next_step


def test_arms_that_serve_models_of_other_names_are_a_warning() -> None:
    (said,) = other_models({"models": {"a": "M", "b": "N"}})
    assert "a M, b N" in said
    assert other_models({"models": {"a": "M", "b": "M"}}) == [] == other_models({})
