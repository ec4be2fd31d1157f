"""What is saved beside a measurement: the static wiring check (a third of a second) and the server's packages."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from specmeter.commands.check import as_document
from specmeter.commands.model_folders import models_of
from specmeter.engines import ServerSpec
from specmeter.errors import SpecmeterError
from specmeter.trace.environment import package_versions
from specmeter.trace.masking import mask_command, mask_env
from specmeter.trace.rundir import RunWriter, load
from specmeter.wiring.check import check_pair, open_pair
from specmeter.wiring.embedded_source import NAME as EMBEDDED
from specmeter.wiring.flag_checks import Settings
from specmeter.wiring.locate import Engine, in_environment


def keep_wiring(writer: RunWriter, spec: ServerSpec, plan: Mapping[str, Any]) -> dict[str, Any] | None:
    """Check the pair that the server of ``spec`` runs, against its own engine's source, into wiring.json.

    Gives the check's result; None where the folders are not known or not here, or the check cannot be made: run.json
    then says why. Never raises: a measurement does not fail for it.
    """
    engine, why = str(spec.engine or plan.get("engine") or ""), "the server's command names no target and draft"
    target, draft = models_of(engine, spec.command)
    if target and draft:
        gone = next((name for name in (target, draft) if not (Path(name) / "config.json").is_file()), None)
        why = f"{gone} is no folder of a model here" if gone else ""
    if why:
        writer.add_facts(wiring=f"not checked: {why}")
        return None
    try:
        result = check_pair(open_pair(Path(str(target)), Path(str(draft))), [_engine(engine, plan)], Settings())
    except SpecmeterError as error:
        writer.add_facts(wiring=f"not checked: {error.what}")
        return None
    document = as_document(result)
    with writer.postponing():
        writer.write_wiring(document)
    found = document["result"]
    assert isinstance(found, dict)
    return found


def keep_beside(writer: RunWriter, spec: ServerSpec) -> None:
    """Both, by the plan that the run (or, where each setting was a start, one of its children) saved. Never raises."""
    plan: Mapping[str, Any] = {}
    with suppress(SpecmeterError):
        saved = load(writer.path)
        plan = saved.plan or next((child.plan for child in saved.children.values() if child.plan), {})
    if plan:
        keep_wiring(writer, spec, plan)
        keep_server(writer, spec, plan)


def keep_server(writer: RunWriter, spec: ServerSpec, plan: Mapping[str, Any]) -> None:
    """The server's command and environment, and its interpreter's packages, into run.json; secrets masked."""
    if spec.command:
        writer.add_facts(server=mask_command(spec.command))
    if spec.env:
        writer.add_facts(server_env=mask_env({str(k): str(v) for k, v in spec.env.items()}))
    python = (plan.get("python") or {}).get("executable")
    found = package_versions(str(python)) if python else {}
    if found:
        writer.add_facts(versions=found)


def _engine(name: str, plan: Mapping[str, Any]) -> Engine:
    if name == "embedded":
        return Engine(EMBEDDED, str(plan.get("engine_version") or ""), None)
    python = (plan.get("python") or {}).get("executable")
    return in_environment(str(python), name) if python else Engine(name, str(plan.get("engine_version") or ""), None)
