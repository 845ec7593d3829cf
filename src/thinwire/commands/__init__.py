"""Commands that are more than a few lines, a file each."""
