"""The built-in prompts, and files of every kind, sound and broken."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from specmeter.bench import prompts as module
from specmeter.bench.prompts import load_prompts
from specmeter.errors import SpecmeterError


def _file(tmp_path: Path, text: str | bytes) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(path)


def test_built_in_set_has_eight_kinds_and_no_repeats() -> None:
    found = load_prompts(None).prompts
    kinds = Counter(prompt.kind for prompt in found)
    expected = {"chat", "code", "maths", "reasoning", "summary", "translation", "extraction", "long"}
    assert set(kinds) == expected and len(found) >= 80 and min(kinds.values()) >= 10
    assert len({prompt.text for prompt in found}) == len({prompt.prompt_id for prompt in found}) == len(found)
    assert min(len(p.text) for p in found if p.kind == "long") > 1500


def test_sample_deals_kinds_in_turn_by_seed() -> None:
    found = load_prompts(None)
    assert len({prompt.kind for prompt in found.sample(8, 3)}) == 8
    assert found.sample(20, 3) == found.sample(20, 3) != found.sample(20, 4)
    assert len(found.sample(300, 0)) == 300


def test_kinds_narrow_and_unknown_kinds_are_named() -> None:
    assert {prompt.kind for prompt in load_prompts(None, ["code"]).prompts} == {"code"}
    with pytest.raises(SpecmeterError) as caught:
        load_prompts(None, ["poems"])
    assert "translation" in caught.value.why


def test_three_forms_of_lines(tmp_path: Path) -> None:
    lines = [
        "Say hello.",
        {"prompt": "Say bye.", "id": "b", "kind": "chat"},
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]},
        {"conversations": [{"from": "human", "value": "One?"}, {"from": "gpt", "value": "Two."}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "In parts"}]}]},
    ]
    found = load_prompts(_file(tmp_path, "\n".join(map(json.dumps, lines)) + "\n")).prompts
    assert [prompt.messages for prompt in found] == [
        (("user", "Say hello."),),
        (("user", "Say bye."),),
        (("system", "Be brief."), ("user", "Why?")),
        (("user", "One?"),),
        (("user", "In parts"),),
    ]
    assert found[1].prompt_id == "b" and found[0].prompt_id == "1"


def test_sharegpt_as_one_list(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "A?"}, {"from": "gpt", "value": "B."}, {"from": "human", "value": "C?"}]
    found = load_prompts(_file(tmp_path, json.dumps([{"id": "x", "conversations": turns}], indent=1))).prompts
    assert found[0].messages == (("user", "A?"), ("assistant", "B."), ("user", "C?"))


def test_broken_lines_are_named_by_number(tmp_path: Path) -> None:
    with pytest.raises(SpecmeterError) as caught:
        load_prompts(_file(tmp_path, '"fine"\n\n{"prompt": \n"also fine"\nnonsense\n'))
    assert "line 3" in caught.value.why and "line 5" in caught.value.why and "line 4" not in caught.value.why


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{}", "has none of"),
        ('{"prompt": 3}', "not a string but int"),
        ('{"prompt": "  "}', "empty"),
        ('{"prompt": "half \\ud83d"}', "surrogate"),
        ('{"prompt": "x", "id": "\\udc00"}', "surrogate"),
        ("17", "neither a string nor an object"),
        ('{"messages": "hello"}', "not a list"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "no turn of the user"),
        ('{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "not text"),
    ],
)
def test_entries_that_are_no_prompt(tmp_path: Path, line: str, reason: str) -> None:
    with pytest.raises(SpecmeterError) as caught:
        load_prompts(_file(tmp_path, f'"fine"\n{line}\n'))
    assert "line 2: " in caught.value.why and reason in caught.value.why


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"prompt": "x", "id": 1e999}', "beyond what a float holds"),
        ('{"prompt": "x", "id": NaN}', "no number of JSON"),
        ('{"prompt": "x", "id": ' + "9" * 30 + "}", "beyond 64 bits"),
        ('{"prompt": "x", "more": ' + "[" * 200 + "]" * 200 + "}", "nested more than"),
        ('{"prompt": "x", "more": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested more than"),
    ],
)
def test_what_no_reader_could_take_is_a_broken_line(tmp_path: Path, line: str, reason: str) -> None:
    with pytest.raises(SpecmeterError) as caught:
        load_prompts(_file(tmp_path, f'"fine"\n{line}\n'))
    assert caught.value.why.startswith("line 2: ") and reason in caught.value.why


@pytest.mark.parametrize("content", ["", " \n\n", "\ufeff"])
def test_empty_files(tmp_path: Path, content: str) -> None:
    with pytest.raises(SpecmeterError, match="is empty"):
        load_prompts(_file(tmp_path, content))


def test_not_utf8_names_the_line(tmp_path: Path) -> None:
    with pytest.raises(SpecmeterError) as caught:
        load_prompts(_file(tmp_path, b'"a"\n"\xff"\n'))
    assert "line 2" in caught.value.why


def test_missing_file_and_huge_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpecmeterError, match="cannot be read"):
        load_prompts(str(tmp_path / "none"))
    monkeypatch.setattr(module, "MAX_FILE_BYTES", 10)
    with pytest.raises(SpecmeterError, match="too large"):
        load_prompts(_file(tmp_path, '"more than ten bytes"'))


def test_long_files_are_read_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PROMPTS", 3)
    assert len(load_prompts(_file(tmp_path, '"x"\n' * 50)).prompts) == 3


def test_what_has_no_size_is_read_up_to_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_FILE_BYTES", 1000)
    with pytest.raises(SpecmeterError, match="too large"):
        load_prompts("/dev/zero")


def test_prompts_of_one_id_are_named_apart(tmp_path: Path) -> None:
    lines = ['{"prompt": "a", "id": "x"}', '{"prompt": "b", "id": "x"}', '{"prompt": "c", "id": 4}', '"d"']
    found = load_prompts(_file(tmp_path, "\n".join(lines))).prompts
    assert [prompt.prompt_id for prompt in found] == ["x", "x#2", "4", "4#4"]


def test_the_sum_of_a_set_follows_its_texts(tmp_path: Path) -> None:
    sums = []
    for text in ("one", "two", "one"):
        file = tmp_path / "prompts.jsonl"
        file.write_text(json.dumps({"prompt": text}) + "\n")
        sums.append(load_prompts(str(file)).sha256)
    assert sums[0] == sums[2] != sums[1]
