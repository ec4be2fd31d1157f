"""Pure functions of a trace: breakdown, acceptance, break-even, statistics."""
