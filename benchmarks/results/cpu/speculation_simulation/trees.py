"""Chains and trees of proposals: what the second and third likeliest tokens of a draft are worth."""
import heapq
import json
from collections import Counter
from pathlib import Path

import torch
from common import *

DEPTHS = 16
model, names, ids, kv, _ = ready()
order = json.loads(Path("skip_layers.json").read_text())["order"]
DRAFTS = {
    "skip 2": (model, order[:2]),
    "skip 4": (model, order[:4]),
    "skip 8": (model, order[:8]),
    "int4 row": (model.rounded(4), ()),
    "int4 g64": (model.rounded(4, 64), ()),
    "int3 row": (model.rounded(3), ()),
    "int3 g32": (model.rounded(3, 32), ()),
}


def best_tree(p, nodes, side_only, deepest=10**6):
    """The tree of `nodes` nodes with the largest sum of path probabilities: a set of paths, each a tuple of ranks, and this sum.

    A child's probability is below its parent's, so the most probable nodes are closed under parents, and the best tree.

    Args:
        p: probability of rank 1, 2, 3 at a position.
        side_only: no path leaves the main chain twice.
    """
    heap, tree, total = [(-q, (rank,)) for rank, q in enumerate(p, 1)], set(), 0.0
    heapq.heapify(heap)
    while len(tree) < nodes and heap:
        q, path = heapq.heappop(heap)
        tree.add(path)
        total -= q
        if len(path) < deepest:
            for rank, each in enumerate(p, 1):
                if rank == 1 or not side_only or max(path) == 1:
                    heapq.heappush(heap, (q * each, (*path, rank)))
    return tree, total


def counted_tree(counts, nodes, deepest=10**6):
    """The same from counts of the paths that occurred."""
    allowed = [(-c, len(path), path) for path, c in counts.items() if len(path) <= deepest]
    return {path for _, _, path in heapq.nsmallest(nodes, allowed)}


def count_paths(ranks):
    counts = Counter()
    for row in ranks.flatten(0, 1).tolist():
        for depth in range(1, DEPTHS + 1):
            if max(row[:depth]) > 3:
                break
            counts[tuple(row[:depth])] += 1
    return counts


def tree_accepted(ranks, tree):
    found = torch.zeros(ranks.shape[:2], dtype=torch.int64)
    for b, rows in enumerate(ranks.tolist()):
        for s, row in enumerate(rows):
            depth = 0
            while depth < DEPTHS and tuple(row[: depth + 1]) in tree:
                depth += 1
            found[b, s] = depth
    return found


def counts_of_others(ranks, cache={}):
    if id(ranks) not in cache:
        each = [count_paths(ranks[text : text + 1]) for text in range(len(ranks))]
        cache[id(ranks)] = [sum(each[:text] + each[text + 1 :], Counter()) for text in range(len(ranks))]
    return cache[id(ranks)]


def held_out(ranks, nodes, deepest):
    """Accepted, with a tree for each text from the paths of the other texts; and the mean depth of these trees."""
    found, depth = [], []
    for text, counts in enumerate(counts_of_others(ranks)):
        tree = counted_tree(counts, nodes, deepest)
        found.append(tree_accepted(ranks[text : text + 1], tree))
        depth.append(max(map(len, tree)))
    return torch.cat(found), sum(depth) / len(depth)


def deepest_of(tree):
    return max(map(len, tree))


file = Path("ranks.pt")
all_ranks = torch.load(file) if file.exists() else {}
check = ranks_from_each_start(model, (), ids[:2], [(k[:2], v[:2]) for k, v in kv], 3, 3)
say("a draft that is the model: all ranks 1:", bool((check[(check < 99)] == 1).all()), f"({clock()})")
for name, (draft, skipped) in DRAFTS.items():
    if name not in all_ranks:
        all_ranks[name] = ranks_from_each_start(draft, set(skipped), ids, kv, DEPTHS, 3, 4)
        torch.save(all_ranks, file)
        say(f"  {name} done ({clock()})")

say("\n1. Drafts. a at d: share of proposals d accepted whose predecessors were; r: ranks of the target's token among first rejections")
say("of all starts; (walk): of the rejections that passes of 8 proposals meet; a after 2nd: acceptance of the proposal after a second child")
found = {}
for name, ranks in all_ranks.items():
    ok = (ranks == 1).long().cumprod(-1)
    before = torch.cat([torch.ones_like(ok[..., :1]), ok[..., :-1]], -1)
    computed = ranks < 99
    a_at = [float(ok[..., d][(before[..., d] == 1) & computed[..., d]].float().mean()) for d in (0, 1, 3, 7)]
    first = (before == 1) & (ok == 0) & computed
    rejected = ranks[first]
    r = [float((rejected == each).float().mean()) for each in (2, 3, 4)]
    met = []
    for b, rows in enumerate(chain_accepted(ranks, 8).tolist()):
        for s in walk(rows):
            rest = [each for each in ranks[b, s, :8].tolist() if each != 1]
            if rest and rest[0] < 99:
                met.append(rest[0])
    rw = [met.count(each) / len(met) for each in (2, 3)]
    second = first & (ranks == 2)
    after = ranks[..., 1:][second[..., :-1]]
    after = after[after < 99]
    a2 = float((after == 1).float().mean())
    offered = int(((before == 1) & computed).sum())
    a = 1 - int(first.sum()) / offered
    found[name] = (a_at[0], r[0], r[1])
    say(
        f"{name:<9} a1 {a_at[0]:.3f}  a at 2, 4, 8 {' '.join(f'{each:.3f}' for each in a_at[1:])}  a of all {a:.3f}  r2 {r[0]:.2f} r3 {r[1]:.2f} r4 {r[2]:.2f}"
        f" of {len(rejected)}  (walk) r2 {rw[0]:.2f} r3 {rw[1]:.2f} of {len(met)}  a after 2nd {a2:.3f} of {len(after)}"
    )

say("\n2. Tokens per pass at equal verified tokens n. expected: independent positions with a1, r2, r3; real: exact, mean of texts (pooled).")
say("side: main chain with side branches, best by the expectation; any: branches of branches too; held out: best for the paths of the other texts")
say("draft     n   chain expected real (pooled)    side expected depth real (pooled)    any expected depth real (pooled)    held out depth real (pooled)")
for name, ranks in all_ranks.items():
    a, r2, r3 = found[name]
    p = (a, (1 - a) * r2, (1 - a) * r3)
    for n in (8, 16, 32):
        text = f"{name:<9} {n:>2}"
        text += f"   {1 + sum(a**i for i in range(1, n + 1)):.2f}"
        m, q = tokens_per_pass(chain_accepted(ranks, n)) if n <= DEPTHS else (float("nan"),) * 2
        text += f" {m:.2f} ({q:.2f})"
        for side_only in (True, False):
            tree, total = best_tree(p, n, side_only)
            m, q = tokens_per_pass(tree_accepted(ranks, tree))
            text += f"    {1 + total:.2f} {deepest_of(tree):>2} {m:.2f} ({q:.2f})"
        own, depth = held_out(ranks, n, DEPTHS)
        m, q = tokens_per_pass(own)
        say(text + f"    {depth:.1f} {m:.2f} ({q:.2f})")

say("\n3. Tokens per pass at equal draft steps D (a batch of branches is one step): chain of D, and trees of at most D levels with N nodes")
say("draft     D  chain expected real (pooled)   then for N: side expected nodes real (pooled), held out real (pooled)")
for name, ranks in all_ranks.items():
    a, r2, r3 = found[name]
    p = (a, (1 - a) * r2, (1 - a) * r3)
    for d in (4, 8, 16):
        m, q = tokens_per_pass(chain_accepted(ranks, d))
        text = f"{name:<9} {d:>2}  {1 + sum(a**i for i in range(1, d + 1)):.2f} {m:.2f} ({q:.2f})"
        for n in (8, 16, 32):
            if n <= d:
                continue
            tree, total = best_tree(p, n, True, d)
            m, q = tokens_per_pass(tree_accepted(ranks, tree))
            m2, q2 = tokens_per_pass(held_out(ranks, n, d)[0])
            text += f"   N={n}: {1 + total:.2f} {len(tree)} {m:.2f} ({q:.2f}), {m2:.2f} ({q2:.2f})"
        say(text)

say("\n4. Pooled tokens per time of a pass, tokens / (1 + c D), D steps of the draft of c passes each: the best chain and the best tree (held out)")
say("of at most N verified tokens, over all D; a pass of N tokens takes as long as one of one")
say("draft     c     then for N = 8, 16, 32: chain (its length)  tree (its levels)  gain")
for name, ranks in all_ranks.items():
    chain = {d: tokens_per_pass(chain_accepted(ranks, d))[1] for d in range(1, 17)}
    trees = {(n, d): tokens_per_pass(held_out(ranks, n, d)[0])[1] for n in (8, 16, 32) for d in (2, 3, 4, 6, 8, 12, 16)}
    for c in (0.01, 0.03, 0.1):
        text = f"{name:<9} {c:.2f}"
        for n in (8, 16, 32):
            best, length = max((chain[d] / (1 + c * d), d) for d in chain if d <= n)
            tree, levels = max((trees[n, d] / (1 + c * d), d) for n_, d in trees if n_ == n)
            text += f"    {best:.2f} ({length})  {tree:.2f} ({levels})  {tree / best - 1:+.1%}"
        say(text)
say(f"({clock()})")
