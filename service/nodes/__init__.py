"""Nodes that compute a front end's experts, or ranges of its layers: found by name, checked, kept on one stream each."""
