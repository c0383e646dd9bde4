"""Other engines on the same shape, run from their own programs; nothing of theirs is part of this project."""
