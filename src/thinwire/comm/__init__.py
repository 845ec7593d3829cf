"""The wire: the only package that calls torch.distributed."""
