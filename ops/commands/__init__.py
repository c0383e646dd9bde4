"""The commands of `colibri`, one a file. Each module has `register(app)`; what is slow to import is imported inside the command."""
