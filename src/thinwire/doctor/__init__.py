"""What is here: the machines of a job, the links between them, and whether its workers agree."""
