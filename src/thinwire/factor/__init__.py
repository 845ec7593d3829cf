"""Models as factors: tensors and modules only, nothing here knows of other workers."""
