"""What docs/balance.md says that no run decides."""

from __future__ import annotations

BEFORE = """# Balance: evening out experts

Generated from the reports in `docs/data` by `python -m ops.bench.balance_doc > docs/balance.md`; a test keeps it current.

A router that has learnt does not use its experts evenly, and what it prefers changes with the text. In a step of 16 streams one expert
may get 13 tokens and its neighbour none. On one node this costs little: lanes share an expert's rows and take work from each other.
Over nodes that hold whole experts, a layer takes as long as the node with most to do. There are two remedies: *placing* experts by what
they had to do, which changes no answer ([operations.md](operations.md)), and *damping*, which sends some tokens to another expert than
the router's own choice. Damping changes answers. This page says by how much, and what it buys. It is off unless asked for.
"""

POLICIES = """## The policies

FORMULAS
"""

JUDGED = """## How they are judged

A queue is the tokens an expert gets in one step; with 16 streams, 8 experts and 2 for each token the mean is 4. Streams decode side by
side, one token a step, and are fed a held-out text (teacher forcing), so that every run predicts the same tokens and two runs can be
compared token by token. Each stream reads its own part of a text, in excerpts, and begins anew when one is over, at another time than
its neighbours; no token is read twice. *mixed*: all kinds of text at once. *shifting*: one kind in all streams, which changes in the
course of the run. A kind's name: that alone.

- *perplexity*: how much more than without a policy; ± is the standard error of the paired difference, excerpts taken as independent.
- *rerouted*: share of the (token, layer) pairs whose experts were not the router's own.
- *variance of queues*: over steps and experts, within a layer. *longest queue*: of a layer in a step, on average and at most. *its
  variance*: over steps, within a layer.
- *experts in use*: those of a layer that have a token in a step; their weights must be read.

Scope `sequence` has a floor. A sequence knows nothing of the others, so at best every one uses its experts evenly, and independently:
with 16 streams and 2 of 8 experts that leaves queues a variance of 3.0, the longest one of 1.1, and no policy of that scope gets below.
"""

NODES = """## Over nodes

max/mean of the nodes' tokens, step by step and layer by layer: 1 is even. *even*: neighbouring experts on a node. *planned*: placed by
the service's planner every 256 steps, by the 256 before; with so many more copies of experts a layer, if it says so. The policies are
those within the smaller loss.
"""

COMMANDS = """## To measure it yourself

    colibri bench balance MODEL.colibri --texts FOLDER                                # every policy and setting
    colibri bench balance MODEL.colibri --texts FOLDER --setting capacity/batch,margin=0.5 --json
    colibri bench balance-speed MODEL.colibri [--texts FOLDER]                        # tokens/s and the router's cost
    colibri record OUT; colibri bench balance-replay OUT --nodes 2,4 --replicas 0,1   # a server's own traffic over nodes

FOLDER has a `.txt` file for each kind of text, none of which the model has seen. Judge your own model before you switch damping on: how
far a token's second choice lies behind its first is the model's own.
"""
