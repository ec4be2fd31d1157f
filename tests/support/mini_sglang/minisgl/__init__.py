"""A miniature server with SGLang's structure: a spawned scheduler, workers that hold workers, graphs, overlap."""
