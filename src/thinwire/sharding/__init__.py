"""Groups that share a model between their workers with FSDP2."""
