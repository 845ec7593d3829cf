"""What a model looks like in training: full, as factors, in a basis."""
