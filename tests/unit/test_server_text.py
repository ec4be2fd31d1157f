"""Stop strings and half characters in text that arrives in pieces."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from specmeter.eagle.server_text import StopMatcher
from specmeter.eagle.tokenizer import StreamDecoder, Tokenizer
from specmeter.errors import SpecmeterError


@pytest.fixture(scope="module")
def bytewise(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A byte level tokenizer without merges: every character beyond ASCII is several tokens."""
    folder = tmp_path_factory.mktemp("bytes")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE(vocab={text: i for i, text in enumerate(alphabet)}, merges=[])
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


def stream(tokenizer: Tokenizer, pieces: list[list[int]]) -> list[str]:
    decoder = StreamDecoder(tokenizer)
    return [*(decoder.push(piece) for piece in pieces), decoder.finish()]


@given(st.lists(st.lists(st.integers(0, 255), max_size=4), max_size=12))
def test_pieces_add_up_to_the_whole_for_any_bytes(bytewise: Tokenizer, pieces: list[list[int]]) -> None:
    assert "".join(stream(bytewise, pieces)) == bytewise.decode([i for piece in pieces for i in piece])


@given(st.text(max_size=12), st.integers(1, 4))
def test_no_piece_holds_half_a_character(bytewise: Tokenizer, text: str, size: int) -> None:
    ids = bytewise.encode(text)
    said = stream(bytewise, [ids[i : i + size] for i in range(0, len(ids), size)])
    assert "".join(said) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in said)


def expected(text: str, stops: list[str]) -> str:
    places = [text.find(stop) for stop in stops if stop in text]
    return text[: min(places)] if places else text


@given(st.lists(st.text("ab", max_size=4), max_size=8), st.lists(st.text("ab", min_size=1, max_size=3), max_size=3))
def test_stops_cut_at_the_first_place(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    said = ""
    for piece in pieces:
        said += matcher.push(piece)
        if matcher.matched:
            break
    whole = "".join(pieces)
    assert matcher.matched is any(stop in whole for stop in stops)
    if not matcher.matched:
        said += matcher.finish()
        assert said == whole
        return
    # Several stops may end in one piece; the cut is at the earliest of those seen by then.
    assert whole.startswith(said) and any(whole[len(said) :].startswith(stop) for stop in stops)
    if len(stops) == 1:
        assert said == expected(whole, stops)


def test_text_is_held_back_only_as_long_as_it_may_be_a_stop() -> None:
    matcher = StopMatcher(["END"])
    assert [matcher.push(piece) for piece in ("a", "E", "N", "x", "EN", "D", "later")] == [
        "a",
        "",
        "",
        "ENx",
        "",
        "",
        "",
    ]
    assert matcher.matched


def make(folder: Path, source: Path, template: str) -> Tokenizer:
    import json

    (folder / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0}, merges=[])).save(str(folder / "tokenizer.json"))
    return folder


def test_templates_may_not_reach_beyond_their_input(tmp_path: Path, source: Path) -> None:
    tokenizer = make(tmp_path, source, "{{ messages.__class__.__base__.__subclasses__() }}")
    with pytest.raises(SpecmeterError, match="refuses") as caught:
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}])
    assert "unsafe" in caught.value.why


def test_templates_that_refuse_or_are_broken_or_absent(tmp_path: Path, source: Path) -> None:
    refusing = make(tmp_path, source, "{{ raise_exception('no system role') }}")
    with pytest.raises(SpecmeterError, match="refuses") as caught:
        refusing.apply_chat_template([])
    assert caught.value.why == "no system role"
    with pytest.raises(SpecmeterError, match="is broken"):
        make(tmp_path, source, "{% for %}")
    with pytest.raises(SpecmeterError, match="no chat template"):
        Tokenizer(source).apply_chat_template([])
