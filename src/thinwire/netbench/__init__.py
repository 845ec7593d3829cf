"""Several virtual hosts on one machine, connected by shaped links, to measure training over a slow network."""
