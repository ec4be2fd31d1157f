"""The traps that a prototype met on a real vLLM, each with the tests that hold it; this test holds the list.

1 a probe inside a compiled model kills the engine; 2 byte code caches poisoned by rewritten code; 3 another
``sitecustomize``; 4 options that keep ours out; 5 modules imported before the hook, reloads; 6 byte code alone;
7 callees that look at frames; 8 coroutines and generators timed at their creation; 9 syntax that rewriting could break;
10 what "in a loop" means; 11 readers of source text; 12 an anchor with several sites; 13 a fork after the mapping;
14 processes killed without a flush; 15 threads; 16 helper processes that leave files.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[2]
TRAPPED = "integration/test_runtime_traps.py"
ARM, LAUNCH = "integration/test_runtime_arm.py", "integration/test_runtime_launch.py"
COMPILE, REWRITE = "integration/test_runtime_compile.py", "unit/source/test_rewrite.py"
ANCHORS, COMMANDS = "unit/source/test_anchors.py", "integration/test_run_commands.py"
TRAPS = {
    1: [(COMPILE, "test_arming_refuses_what_is_compiled_or_inlined"),
        (COMPILE, "test_a_compilation_while_armed_works_as_without_us"), (REWRITE, "test_refused_with_the_reason")],
    2: [(LAUNCH, "test_bytecode_caches_stay_clean_in_both_directions")],
    3: [(LAUNCH, "test_an_existing_sitecustomize_still_runs"),
        (LAUNCH, "test_an_existing_sitecustomize_that_fails_fails_as_without_us"),
        (TRAPPED, "test_each_process_runs_the_other_sitecustomize_once_and_ours"),
        (TRAPPED, "test_a_sitecustomize_that_comes_before_ours_is_noticed"),
        (TRAPPED, "test_a_launch_says_that_another_sitecustomize_kept_the_runtime_out")],
    4: [(LAUNCH, "test_options_that_keep_the_runtime_out_are_reported"),
        (COMMANDS, "test_a_runtime_that_did_not_come_up_is_said")],
    5: [(LAUNCH, "test_a_module_imported_before_the_hook_is_taken"), (LAUNCH, "test_reload_keeps_the_probes")],
    6: [(LAUNCH, "test_a_module_without_source_is_refused"),
        ("unit/source/test_locate.py", "test_byte_code_alone_is_refused")],
    7: [(REWRITE, "test_refused_with_the_reason"), (REWRITE, "test_wrapped_call_gives_the_same_result_and_is_seen")],
    8: [(ARM, "test_a_call_that_turns_out_to_create_a_coroutine_is_disarmed_not_timed"),
        (ARM, "test_nested_functions_and_async_code_run"), (REWRITE, "test_await_is_wrapped_around_the_await")],
    9: [(REWRITE, "test_wrapped_call_gives_the_same_result_and_is_seen"),
        (REWRITE, "test_line_numbers_and_traceback_text_stay")],
    10: [(ANCHORS, "test_inside"), (ANCHORS, "test_what_is_evaluated_once_lies_outside")],
    11: [(TRAPPED, "test_readers_of_source_text_read_what_they_read_without_us"),
         (TRAPPED, "test_a_cache_by_source_text_gets_the_same_graph")],
    12: [(TRAPPED, "test_the_branches_of_one_anchor_are_told_apart_and_added_up"),
         (TRAPPED, "test_another_number_of_sites_is_refused_with_all_of_them"),
         (REWRITE, "test_nested_points_are_both_wrapped")],
    13: [(LAUNCH, "test_children_write_their_own_rings"),
         (LAUNCH, "test_fork_gives_no_warning_and_the_child_has_its_own_control_line")],
    14: [(LAUNCH, "test_kill_9_keeps_every_completed_record")],
    15: [(ARM, "test_threads_get_lanes_of_their_own")],
    16: [(LAUNCH, "test_a_process_without_plan_modules_leaves_no_file")],
}  # fmt: skip


@pytest.mark.parametrize("trap", range(1, 17))
def test_each_trap_has_its_tests(trap: int) -> None:
    for file, name in TRAPS[trap]:
        tree = ast.parse((TESTS / file).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{file}: {name}"
