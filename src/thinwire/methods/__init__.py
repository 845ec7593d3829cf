"""One paper, one file; `base.py` is the contract they all fulfil."""
