"""Saved runs in other tools' formats: timelines, tables, metrics. Reads run directories, never servers."""
