"""A miniature engine in tensor parallel: a process a rank, which wait for each other in every all-reduce."""
