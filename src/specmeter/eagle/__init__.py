"""The embedded EAGLE-3 engine. It knows nothing of the tool: it is an engine like the others, probed by a recipe."""
