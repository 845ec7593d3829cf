"""The machines of a job, the links between them, and whether its workers agree."""
