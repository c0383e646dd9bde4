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

All of them exchange, for some tokens and layers, one of the k experts that the router chose for another. Three rules hold for each: the
other expert's selection score lies at most `margin` below that of the one given up; of the (token, layer) pairs at most `max_rerouted`
are changed, counted in the step (scope `batch`) or along the sequence (scope `sequence`); and the weights with which the experts'
outputs are added up are those the router's own formula gives the experts that were taken, from the scores it found.

Giving up expert a for expert b *loses* w(a)² - w(b)². w(e) is the weight that e has, or would have beside the router's choice:
exp(score of e) over the sum of that of the chosen. The square is what an expert's part in the output counts for. For the same evenness
this costs less perplexity than to go by the weights themselves, by probabilities or by logits. What an exchange *saves* is price(a) -
price(b). Exchanges are made as long as one saves more than it loses, the best first; so those tokens move that lose least. The policies
differ in the price:

| policy, scope | what it depends on | price |
|---|---|---|
| `heat`, `batch` | the queues of the step | of the n-th token in a queue: growth^(n / mean - 1) - 1; mean: of all queues |
| `heat`, `sequence` | the sequence's own tokens so far | growth^((heat - threshold) (1 - decay)) - 1, 0 below the threshold |
| `capacity`, `batch` | the queues of the step | none up to capacity_factor times the mean; above that, any |
| `capacity`, `sequence` | the sequence's own tokens so far | none up to capacity_factor times the experts' mean heat; above that, any |
| `reuse`, `batch` | which experts the step uses | an expert is emptied if all its tokens can go to others in use, cheapest first |

An expert's heat grows by 1 with each token that uses it, and is multiplied by `decay` with each that does not (capacity: with each).

Scope `sequence` depends on the sequence's own tokens alone: the same answer whatever else runs, in whatever batches. Scope `batch`
evens the queues out where they arise, but what others ask then changes an answer. A token of a sequence without damping is never moved.
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
the service's planner every 64 steps, by the 64 before; with so many more copies of experts a layer, if it says so. The policies are
those within the smaller loss.
"""

SPEED = """## What it costs and gains in time

16 streams, worker processes as the service has them; all policies in turn, 16 steps each: ratios are of neighbouring runs.

    colibri bench balance-speed ops/tiny/tiny.colibri --texts ops/tiny/texts --rounds 100 --setting ...
    colibri bench make-model --shape mm --quant int4 mm-int4.colibri
    colibri bench balance-speed mm-int4.colibri --rounds 12 --setting ...

`tiny` fits the caches: a step takes half a millisecond, in which a router of a few microseconds counts, and weights that are not read save
little. `mm-int4` (8 layers, 396 MB of experts) is read from memory in every step, as real models are. Its weights are random: it routes
evenly, so nearly all experts are in use in every step, and what `reuse` would cost it in perplexity cannot be said. A margin that leaves as
many fewer experts in use as `tiny` can afford shows what that saves.
"""

COMMANDS = """## To measure it yourself

    colibri bench balance MODEL.colibri --texts FOLDER                                # every policy and setting
    colibri bench balance MODEL.colibri --texts FOLDER --setting capacity/batch,margin=0.5 --json
    colibri bench balance-speed MODEL.colibri [--texts FOLDER]                        # tokens/s and the router's cost
    colibri record OUT; colibri bench balance-replay OUT --nodes 2,4 --replicas 0,1   # a server's own traffic over nodes

FOLDER has a `.txt` file for each kind of text, none of which the model has seen. Judge your own model before you switch damping on: how
far a token's second choice lies behind its first is the model's own.
"""
