"""One file for each model family, each readable alone; `protocol` says what they have in common."""
