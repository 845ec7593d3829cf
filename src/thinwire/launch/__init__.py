"""Workers of a job: what they are to do, how they are started, and why they ended."""
