"""Node agents as actors on a running Ray cluster (`colibri ray up`). Needs the extra `ray`; nothing else of Colibri does."""
