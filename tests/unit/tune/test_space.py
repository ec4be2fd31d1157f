"""The space: flags of this version, constraints, the user's file, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from specmeter.engines import ServerSpec, Setting
from specmeter.errors import SpecmeterError
from specmeter.tune.defaults import DRAFT_TP, read_space, space_for
from specmeter.tune.flags import EAGLE_DRAFT_TP, EngineFlags, engine_flags, flags_in_source, parse_help
from specmeter.tune.space import Candidate, Space, settings_of

EMBEDDED = ServerSpec("embedded", (sys.executable, "-m", "specmeter", "serve", "--threads", "1"))
SGLANG = ServerSpec("sglang", ("python", "-m", "sglang.launch_server", "--tp-size", "2"), env={"NCCL_PROTO": "LL"})
FLAGS = EngineFlags(
    {"--attention-backend": ("fa3", "triton"), "--disable-custom-all-reduce": (), "--dtype": (), "--threads": ()},
    "a test",
)


def _space(tmp_path: Path, text: str, spec: ServerSpec = EMBEDDED, flags: EngineFlags = FLAGS) -> Space:
    file = tmp_path / "space.toml"
    file.write_text(text)
    return space_for(spec, flags, read_space(file))


def test_default_space_of_the_embedded_engine_is_its_chains_and_the_baseline() -> None:
    space = space_for(EMBEDDED, FLAGS)
    assert [s.steps for s in space.settings] == [0, 1, 2, 3, 4, 5, 6] and not space.dimensions
    assert len(list(space.candidates())) == 7


def test_flags_come_from_the_programs_own_help() -> None:
    flags = engine_flags(EMBEDDED)
    assert flags.has("--speculative-num-steps") and flags.has("--max_context")
    assert {"auto", "bfloat16"} <= set(flags.of("--dtype")) and flags.source.endswith("--help")


def test_help_and_source_texts() -> None:
    found = parse_help("usage: x [--attention-backend {fa3,triton}] [--no-x | --x] --steps N\n  see --long-name.")
    assert found["--attention-backend"] == ("fa3", "triton") and {"--x", "--no-x", "--long-name"} <= set(found)
    text = (
        'CHOICES = ["a", "b"]\nSAMPLING_CHOICES = ["s"]\nclass ServerArgs:\n    tp_size: int = 1\n'
        'p.add_argument("--kind", choices=CHOICES)\np.add_argument("--plain_one", "-p", choices=["z"])\n'
    )
    found = flags_in_source(text)
    assert found == {"--kind": ("a", "b"), "--plain-one": ("z",), "--tp-size": (), "--sampling": ("s",)}
    fields = ", ".join(f'"field_{i}"' for i in range(60))
    assert "--field-59" in flags_in_source(f"ORDER = ({fields})")


@pytest.mark.parametrize("place", ["openai", "launchers"])
def test_vllms_server_flags_are_read_where_each_version_has_them(place: str, tmp_path: Path) -> None:
    package = tmp_path / "vllm" / "entrypoints" / place
    package.mkdir(parents=True)
    for folder in (tmp_path / "vllm", package.parent, package):
        (folder / "__init__.py").write_text("")
    (package / "cli_args.py").write_text("class FrontendArgs:\n    a_b: int = 1\n    c: int = 1\n    d: int = 1\n")
    command = (sys.executable, "-c", "print('no help here')")
    flags = engine_flags(ServerSpec("vllm", command, {"PYTHONPATH": str(tmp_path)}))
    assert flags.has("--a-b") and flags.source == f"source: vllm.entrypoints.{place}.cli_args"


def test_collectives_are_left_out_with_the_reason_unless_there_are_several_ranks() -> None:
    one = space_for(ServerSpec("sglang", ("python", "-m", "sglang.launch_server")), FLAGS)
    assert not one.dimensions and "tensor parallel size is 1" in dict(one.skipped)["NCCL and all-reduce"]
    two = space_for(SGLANG, FLAGS)
    names = {d.name for d in two.dimensions}
    assert {"NCCL_ALGO", "NCCL_BUFFSIZE", "--disable-custom-all-reduce"} <= names
    # Set by the user already, and never NVLS unasked.
    assert "NCCL_PROTO" not in names and not any("NVLS" in str(d.values) for d in two.dimensions)
    inherited = space_for(SGLANG, FLAGS, exported={"NCCL_ALGO": "Ring"})
    assert "NCCL_ALGO" not in {d.name for d in inherited.dimensions} and "NCCL_BUFFSIZE" in names
    assert dict(inherited.skipped)["NCCL_ALGO"] == "set by the user's environment (Ring)"


def _vllm(method: str, size: int = 2) -> ServerSpec:
    config = json.dumps({"method": method, "model": "H", "num_speculative_tokens": 3})
    return ServerSpec("vllm", ("vllm", "serve", "M", "-tp", str(size), "--speculative-config", config))


def test_a_tensor_parallel_size_of_the_draft_only_where_the_engine_honours_it(tmp_path: Path) -> None:
    name = "--speculative-config.draft_tensor_parallel_size"
    text = f'[space.flags]\n"{name}" = ["default", "1"]\n'
    fields = frozenset({"draft_tensor_parallel_size"})
    ignores, reads = EngineFlags({}, "t", fields=fields), EngineFlags({}, "t", fields=fields | {EAGLE_DRAFT_TP})
    space = _space(tmp_path, text, _vllm("eagle3"), ignores)
    assert (
        name not in {d.name for d in space.dimensions} and "no module of it reads it" in dict(space.skipped)[DRAFT_TP]
    )
    for spec, flags in ((_vllm("eagle3"), reads), (_vllm("draft_model"), ignores)):
        space = _space(tmp_path, text, spec, flags)
        assert name in {d.name for d in space.dimensions} and DRAFT_TP not in dict(space.skipped)
        arm = Candidate(Setting.of(2), ((name, "1"),)).arm(spec)
        assert '"draft_tensor_parallel_size": 1' in arm.spec.command[-1] and name not in arm.spec.command
    assert "not tried unasked" in dict(space_for(_vllm("draft_model"), ignores).skipped)[DRAFT_TP]
    assert "SGLang has no flag" in dict(space_for(SGLANG, FLAGS).skipped)[DRAFT_TP]
    assert DRAFT_TP not in dict(space_for(_vllm("eagle3", 1), ignores).skipped)
    with pytest.raises(SpecmeterError, match="no flag --speculative-config"):
        _space(tmp_path, text, _vllm("eagle3"), EngineFlags({}, "t"))


def test_graph_sizes_are_named_where_the_version_has_them() -> None:
    flags = EngineFlags({"--cuda-graph-max-bs": ()}, "t")
    assert "--cuda-graph-max-bs in the space file" in dict(space_for(SGLANG, flags).skipped)["graph sizes"]
    assert "graph sizes" not in dict(space_for(SGLANG, FLAGS).skipped)


def test_variables_of_nccl_are_left_out_where_a_profile_shows_that_it_serves_nothing(tmp_path: Path) -> None:
    why = "NCCL serves 0 of 61 collectives in verify: no variable can help while FlashInfer does"
    space = space_for(SGLANG, FLAGS, None, why)
    assert {d.name for d in space.dimensions} == {"--disable-custom-all-reduce"}
    assert dict(space.skipped)["NCCL's variables"] == why
    file = tmp_path / "space.toml"
    file.write_text('[space.env]\nNCCL_ALGO = ["default", "Ring"]\n')
    assert "NCCL_ALGO" in {d.name for d in space_for(SGLANG, FLAGS, read_space(file), why).dimensions}


def test_the_users_file_narrows_and_widens(tmp_path: Path) -> None:
    space = _space(
        tmp_path,
        "[space]\nsteps = [2, 4]\ntopk = [1, 4]\ndraft_tokens = [8]\n"
        'forbid = [{ steps = 4, "--attention-backend" = "triton" }]\n'
        '[space.flags]\n"--attention-backend" = ["default", "triton"]\n[space.env]\nA_B = ["1"]\n',
    )
    labels = [c.label for c in space.candidates()]
    assert "k=4 top-k=4 tokens=8, A_B=1" in labels and "k=2, --attention-backend=triton, A_B=1" in labels
    assert not any(label.startswith("k=4") and "triton" in label for label in labels)


def test_rules_hold_for_switches_and_for_knobs_left_alone(tmp_path: Path) -> None:
    space = _space(
        tmp_path,
        "[space]\nsteps = [1, 2]\n"
        'forbid = [{ steps = 2, "--disable-custom-all-reduce" = true }, { steps = 1, A_B = "default" }]\n'
        '[space.flags]\n"--disable-custom-all-reduce" = ["default", true]\n[space.env]\nA_B = ["default", "1"]\n',
    )
    labels = {c.label for c in space.candidates()}
    assert "k=1, --disable-custom-all-reduce, A_B=1" in labels and "k=2" in labels
    assert not any(label.startswith("k=2, --dis") for label in labels) and "k=1" not in labels


def test_a_candidates_command_has_its_flags_and_variables(tmp_path: Path) -> None:
    space = _space(
        tmp_path,
        '[space]\nsteps = [3]\n[space.flags]\n"--disable-custom-all-reduce" = [true]\n[space.env]\nX = ["1"]\n',
    )
    arm = next(c for c in space.candidates() if c.setting.steps == 3).arm(EMBEDDED)
    assert "--disable-custom-all-reduce" in arm.spec.command and arm.spec.env == {"X": "1"}
    assert arm.setting == Setting.of(3)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1", "no [space] table"),
        ("[space", "not valid TOML"),
        ("[space]\nstep = [1]", "unknown keys: step"),
        ("[space]\nsteps = []", "no feasible point"),
        ("[space]\nsteps = [-1]", "list of numbers"),
        ("[space]\ntopk = [4]", "needs its size"),
        ("[space]\nsteps = [1]\nforbid = [{ topk = 1 }]", "no feasible point"),
        ('[space.flags]\n"--attention-backnd" = ["fa3"]', "no flag --attention-backnd"),
        ('[space.flags]\n"--attention-backend" = ["fa9"]', "no value fa9"),
        ("[space]\nforbid = [{ tpk = 4 }]", "`forbid` names tpk"),
        ('[space.env]\nNCCL_ALGO = ["NVLS"]', "turn NVLS on"),
        ('[space.env]\nNCCL_NVLS_ENABLE = ["1"]', "turn NVLS on"),
        ('[space.env]\n"--x" = ["1"]', "not usable"),
    ],
)
def test_bad_space_files(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(SpecmeterError) as caught:
        _space(tmp_path, text)
    assert said in str(caught.value)


def test_nvls_only_where_the_user_allows_it(tmp_path: Path) -> None:
    space = _space(tmp_path, '[space]\nallow_nvls = true\n[space.env]\nNCCL_ALGO = ["NVLS"]\n')
    assert space.dimensions[0].values == ("NVLS",)
    assert _space(tmp_path, '[space.env]\nNCCL_NVLS_ENABLE = ["0"]\n').dimensions


def test_a_chains_draft_tokens_follow_from_its_steps() -> None:
    assert settings_of([0, 2], [1], [99]) == (Setting.of(0), Setting(2, 1, 3))
    assert settings_of([2], [4], [8, 999]) == (Setting.of(2, 4, 8),)
    with pytest.raises(SpecmeterError, match="feasible"):
        settings_of([2], [4], [999])
