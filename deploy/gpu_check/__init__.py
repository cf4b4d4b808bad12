"""The check of a GPU before it serves: Stepweave's own steps, on random weights of real sizes."""
