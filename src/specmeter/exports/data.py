"""A run's tables and documents for other tools: Parquet files or one JSON document; docs/schema.md has each column."""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO, Any

from specmeter import __version__
from specmeter.errors import SpecmeterError, needs_extra
from specmeter.trace.rundir import Run
from specmeter.trace.tables import Columns

TABLE_SCHEMA = "specmeter/table/1"
JSON_SCHEMA = "specmeter/export/1"
TABLES = ("cycles", "spans", "requests")


def tables(run: Run) -> dict[str, Columns]:
    """The tables that the run has, by name; columns of equal length."""
    found = {name: table for name in TABLES if (table := getattr(run, name))}
    for name, columns in found.items():
        if len({len(column) for column in columns.values()}) != 1:
            raise SpecmeterError(f"The table {name} of {run.path} is damaged", "Its columns differ in length.")
    if not found:
        raise SpecmeterError(
            f"{run.path} holds no tables",
            "Nothing was recorded, or the run was cut off.",
            "Name a run that has them; children/ may.",
        )
    return found


def json_document(run: Run) -> dict[str, Any]:
    """Everything of the run in one document (specmeter/export/1): run, plan, analysis, tables by column."""
    by_column = {
        name: {key: column.tolist() for key, column in columns.items()} for name, columns in tables(run).items()
    }
    return {
        "schema": JSON_SCHEMA,
        "version": __version__,
        "run": run.run,
        "plan": run.plan,
        "analysis": run.analysis or None,
        "tables": by_column,
    }


def write_json_export(run: Run, file: IO[str]) -> None:
    """Write ``json_document`` to an open file."""
    json.dump(json_document(run), file, allow_nan=False)
    file.write("\n")


def arrow_table(columns: Columns, name: str, run_id: str) -> Any:
    """A pyarrow.Table whose metadata names its schema, its table and its run. Raises SpecmeterError without pyarrow."""
    try:
        import pyarrow as arrow
    except ImportError as error:
        raise needs("pyarrow", "data", "Parquet and Arrow tables") from error
    table = arrow.table({key: arrow.array(value) for key, value in columns.items()})
    return table.replace_schema_metadata(
        {"specmeter.schema": TABLE_SCHEMA, "specmeter.table": name, "specmeter.run": run_id,
         "specmeter.version": __version__}
    )  # fmt: skip


def write_parquet(run: Run, folder: Path) -> list[Path]:
    """Write a Parquet file for each table into an existing folder."""
    found = {name: arrow_table(columns, name, str(run.run.get("id", ""))) for name, columns in tables(run).items()}
    import pyarrow.parquet as parquet

    paths = []
    for name, table in found.items():
        path = folder / f"{name}.parquet"
        parquet.write_table(table, path)
        path.chmod(0o600)
        paths.append(path)
    return paths


def needs(package: str, extra: str, what: str) -> SpecmeterError:
    """The error for an optional library that is not installed."""
    why = "It is not installed here; the base install is kept small."
    return needs_extra(f"{what} need the package {package}", why, extra)
