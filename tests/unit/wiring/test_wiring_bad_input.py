"""Checkpoints that lie, loop or carry code: a clear refusal, and nothing of them executed."""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from specmeter.checkpoint.safetensors_header import read_header
from specmeter.cli import main
from specmeter.errors import Exit, SpecmeterError
from specmeter.wiring.check import check_pair, open_pair
from specmeter.wiring.flag_checks import Settings
from tests.support.wiring_pairs import make, write_safetensors


def raw(path: Path, header: str | bytes, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else header.encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def _empty(path: Path) -> Path:
    path.touch()
    return path


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> str:
    return json.dumps({"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}})


LIES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "empty file": (_empty, "not even a header length"),
    "header length beyond the file": (lambda p: raw(p, entry(), bytes(8), length=5000), "claims 5000 bytes"),
    "huge header length": (lambda p: raw(p, entry(), bytes(8), length=2**62), "the format allows"),
    "no JSON": (lambda p: raw(p, "hello"), "does not start with"),
    "broken JSON": (lambda p: raw(p, '{"a": '), "not sound JSON"),
    "JSON nested very deeply": (lambda p: raw(p, '{"a":' * 100_000), "nested too deeply"),
    "not UTF-8": (lambda p: raw(p, b'{"\xff": 1}'), "not sound JSON"),
    "an array in place of the object": (lambda p: raw(p, "[1]"), "does not start with"),
    "a name twice": (
        lambda p: raw(p, '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
                         '"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}', bytes(8)),
        "occurs twice",
    ),
    "unknown dtype": (lambda p: raw(p, entry("F7"), bytes(8)), "unknown dtype"),
    "dtype that is a list": (lambda p: raw(p, entry(["F32"]), bytes(8)), "unknown dtype"),
    "negative size": (lambda p: raw(p, entry(shape=[-2]), bytes(8)), "shape"),
    "size that is a boolean": (lambda p: raw(p, entry(shape=[True]), bytes(8)), "shape"),
    "offsets backwards": (lambda p: raw(p, entry(offsets=[8, 0]), bytes(8)), "lies at bytes"),
    "offsets beyond the file": (lambda p: raw(p, entry(offsets=[0, 80]), bytes(8)), "lies at bytes"),
    "size that its bytes do not match": (lambda p: raw(p, entry(shape=[3]), bytes(8)), "needs another size"),
    "enormous shape": (lambda p: raw(p, entry(shape=[2**60, 2**60]), bytes(8)), "needs another size"),
    "bytes of no tensor": (lambda p: raw(p, entry(), bytes(12)), "after the last tensor"),
    "a hole between tensors": (
        lambda p: raw(p, '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
                         '"b":{"dtype":"F32","shape":[1],"data_offsets":[8,12]}}', bytes(12)),
        "of no tensor before",
    ),
    "overlapping tensors": (
        lambda p: raw(p, '{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
                         '"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}', bytes(12)),
        "overlaps",
    ),
    "NaN as a size": (lambda p: raw(p, '{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,4]}}', bytes(4)), "NaN"),
}  # fmt: skip


@pytest.mark.parametrize("name", LIES)
def test_a_header_that_lies_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    write, reason = LIES[name]
    with pytest.raises(SpecmeterError) as caught:
        read_header(write(tmp_path / "x.safetensors"))
    assert reason in str(caught.value)


def test_a_sound_header_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_safetensors(path, {"a": ("BF16", (2, 3)), "b": ("I64", (0,)), "c": ("BOOL", (5,))}, {"c": b"\1\0\1\0\1"})
    found = read_header(path)
    assert {name: (t.dtype, t.shape, t.end - t.start) for name, t in found.items()} == {
        "a": ("BF16", (2, 3), 12),
        "b": ("I64", (0,), 0),
        "c": ("BOOL", (5,), 5),
    }


def pair(folder: Path) -> tuple[Path, Path]:
    return make("llama").write(folder)


def test_no_config(tmp_path: Path) -> None:
    target, draft = pair(tmp_path)
    (draft / "config.json").unlink()
    with pytest.raises(SpecmeterError, match=r"draft folder .* has no config.json"):
        open_pair(target, draft)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SpecmeterError, match="cannot read"):
        open_pair(tmp_path / "none", tmp_path)


@pytest.mark.parametrize("text", ['{"a": ', '{"hidden_size": 1, "hidden_size": 2}', "[]", '{"a":' * 50_000])
def test_broken_config(text: str, tmp_path: Path) -> None:
    target, draft = pair(tmp_path)
    (target / "config.json").write_text(text)
    with pytest.raises(SpecmeterError, match=r"config\.json"):
        open_pair(target, draft)


def test_a_loop_of_links(tmp_path: Path) -> None:
    target, draft = pair(tmp_path)
    (draft / "model.safetensors").unlink()
    (draft / "model.safetensors").symlink_to(draft / "other.safetensors")
    (draft / "other.safetensors").symlink_to(draft / "model.safetensors")
    with pytest.raises(SpecmeterError, match="cannot open"):
        open_pair(target, draft)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "chat_template.jinja"])
def test_a_loop_of_links_in_place_of_any_file(name: str, tmp_path: Path) -> None:
    made = make("llama")
    made.files["target/chat_template.jinja"] = b"x"
    target, draft = made.write(tmp_path)
    (draft / name).unlink(missing_ok=True)
    (draft / name).symlink_to(name)
    with pytest.raises(SpecmeterError, match=r"cannot open .*\n.*loop of symbolic links"):
        check_pair(open_pair(target, draft), [], Settings())


def test_a_folder_that_is_a_loop_of_links(tmp_path: Path) -> None:
    target, _ = pair(tmp_path)
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(SpecmeterError, match="cannot read the draft folder"):
        open_pair(target, tmp_path / "a")


def test_a_folder_that_links_to_itself_inside_is_no_trouble(tmp_path: Path) -> None:
    target, draft = pair(tmp_path)
    (draft / "self").symlink_to(draft)
    assert open_pair(target, draft).head.states == 3


def test_links_into_a_cache_are_followed(tmp_path: Path) -> None:
    target, draft = pair(tmp_path)
    blob = tmp_path / "blob"
    (draft / "model.safetensors").rename(blob)
    (draft / "model.safetensors").symlink_to(blob)
    assert open_pair(target, draft).head.states == 3


def test_a_pipe_does_not_hang_the_check(tmp_path: Path) -> None:
    target, draft = pair(tmp_path)
    (draft / "model.safetensors").unlink()
    os.mkfifo(draft / "model.safetensors")
    with pytest.raises(SpecmeterError, match="not a regular file"):
        open_pair(target, draft)


class _Trap:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (os.mkdir, (os.environ["TRAP"],))


def test_a_pickle_is_refused_and_never_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAP", str(tmp_path / "trap"))
    target, draft = pair(tmp_path)
    (draft / "model.safetensors").unlink()
    (draft / "pytorch_model.bin").write_bytes(pickle.dumps(_Trap()))
    with pytest.raises(SpecmeterError, match="only as pickles") as caught:
        open_pair(target, draft)
    assert caught.value.exit is Exit.REFUSED
    assert not (tmp_path / "trap").exists()


CODE = "import os, pathlib\npathlib.Path(os.environ['TRAP']).mkdir()\n"


@pytest.mark.parametrize("flags", [{"auto_map": {"AutoModel": "modeling_x.X"}}, {"trust_remote_code": True}])
def test_code_of_a_checkpoint_is_named_and_never_run(
    flags: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRAP", str(tmp_path / "trap"))
    made = make("llama")
    made.draft.update(flags)
    for name in ("modeling_x.py", "configuration_x.py", "sitecustomize.py", "__init__.py", "setup.py"):
        made.files[name] = made.files[f"target/{name}"] = CODE.encode()
    target, draft = made.write(tmp_path / "pair")
    monkeypatch.chdir(draft)
    assert main(["check", "--target", str(target), "--draft", str(draft)]) == 0
    assert "remote-code" in capsys.readouterr().out
    assert not (tmp_path / "trap").exists()


def test_exit_codes_of_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, draft = pair(tmp_path)
    (draft / "model.safetensors").rename(draft / "pytorch_model.bin")
    assert main(["check", "--target", str(target), "--draft", str(draft), "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["error"]["exit"] == 3
    (draft / "config.json").write_text("{")
    assert main(["check", "--target", str(target), "--draft", str(draft)]) == 2
    said = capsys.readouterr().err
    assert "not sound JSON" in said and "Traceback" not in said


def test_a_config_with_infinity_is_read(tmp_path: Path) -> None:
    made = make("llama")
    made.target["time_step_limit"] = [0.0, float("inf")]
    assert open_pair(*made.write(tmp_path)).target.layers == 32


def test_two_heads_under_two_namings(tmp_path: Path) -> None:
    made = make("llama")
    made.draft_tensors.update({f"model.{name}": size for name, size in dict(made.draft_tensors).items()})
    with pytest.raises(SpecmeterError, match="holds two heads"):
        open_pair(*made.write(tmp_path))


def test_two_heads_in_one_folder(tmp_path: Path) -> None:
    target, draft = pair(tmp_path)
    (draft / "second.safetensors").hardlink_to(draft / "model.safetensors")
    with pytest.raises(SpecmeterError, match="two checkpoints"):
        open_pair(target, draft)


def index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_an_index_that_leaves_its_folder_is_refused(tmp_path: Path) -> None:
    target, draft = pair(tmp_path)
    index(target, {"a": "../draft/model.safetensors"})
    with pytest.raises(SpecmeterError, match="not a file name"):
        open_pair(target, draft)


def test_an_index_that_names_a_missing_shard(tmp_path: Path) -> None:
    target, draft = pair(tmp_path)
    index(target, {"a": "model-00002.safetensors"})
    with pytest.raises(SpecmeterError, match="not in"):
        open_pair(target, draft)


def test_an_index_without_a_map(tmp_path: Path) -> None:
    target, draft = pair(tmp_path)
    index(target, None)
    with pytest.raises(SpecmeterError, match="no weight_map"):
        open_pair(target, draft)


def test_a_tensor_that_the_index_lists_and_no_shard_holds_is_noticed(tmp_path: Path) -> None:
    target, draft = pair(tmp_path)
    index(target, {"model.norm.weight": "model.safetensors", "lost.weight": "model.safetensors"})
    assert open_pair(target, draft).target_files.missing == ("lost.weight",)
