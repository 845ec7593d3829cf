"""What a method would send and how long it would take, without running it."""
