"""The nodes that compute experts for this front end: found by name, checked, asked over one stream each, replaced when they fail."""
