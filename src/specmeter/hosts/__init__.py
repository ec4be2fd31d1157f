"""Where code runs: ``--on`` sends a command, with the parts of specmeter it needs, to another host to run there."""
