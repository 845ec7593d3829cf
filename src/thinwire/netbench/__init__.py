"""Several hosts on one machine, behind links as slow as asked: a network to measure training on."""
