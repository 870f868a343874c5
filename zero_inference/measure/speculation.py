"""Speculative decoding: a draft proposes tokens, and one pass of the target model verifies them. Ids, greedy or sampled, are those of the
target model alone, up to rounding: a pass of several tokens may break a near tie otherwise.

The rows of a batch accept different numbers of tokens, but share their cached positions: those that the row with the fewest tokens has
computed. In the next pass a row that is ahead feeds its known tokens again, and proposals up to the same position:

    cached 6      row 0, 7 tokens: [t6 p p p p]      t: known token, p: proposal
                  row 1, 9 tokens: [t6 t7 t8 p p]

With as many proposals for each row, rows would get further ahead of others, and passes and drafts longer.

Masks and position ids are those of a prompt, for any family and attention, and the cache only has to forget its last positions.
"""

from __future__ import annotations

import inspect
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch.profiler import record_function

from zero_inference.config.option import AUTO
from zero_inference.config.options import SELF
from zero_inference.config.run_config import RunConfig
from zero_inference.engines.base import LoadedModel
from zero_inference.kv_cache.device import PreallocatedCache
from zero_inference.measure.sampling import Sampler
from zero_inference.models.layers import cache_per_module, decoder_layers
from zero_inference.planning.cost import expected_tokens
from zero_inference.records.schema import SpeculationUse
from zero_inference.utils.patching import Patches
from zero_inference.utils.ranks import Ranks

LONGEST_NGRAM = 8
# For `DraftLength`
LATEST = 5  # times, of which the shortest counts
REMEMBERED = 0.9  # weight of the acceptance before a pass
TRIES = 2  # of each length
MIN_TRIALS = 8  # passes with proposals before they may end


class Draft(Protocol):
    def begin(self, texts: Sequence[list[int]], cache: PreallocatedCache) -> None:
        """Begin a generation after the prompts `texts`, with the empty KV cache of the target model."""

    def propose(self, texts: Sequence[list[int]], counts: Sequence[int]) -> list[list[int]]:
        """Return up to `counts[row]` token ids that may follow each of `texts`, which continue those of the call before."""


class NgramDraft:
    """Proposes the tokens after the latest earlier occurrence of a text's last tokens, of as many of these as have occurred."""

    def begin(self, texts: Sequence[list[int]], cache: PreallocatedCache) -> None:
        # A dictionary per row: n-gram -> index of the token after its latest occurrence, for n-grams that end before `indexed`.
        self.followers: list[dict[tuple[int, ...], int]] = [{} for _ in texts]
        self.indexed = [1] * len(texts)

    def propose(self, texts: Sequence[list[int]], counts: Sequence[int]) -> list[list[int]]:
        return [self._continue(row, text, count) for row, (text, count) in enumerate(zip(texts, counts))]

    def _continue(self, row: int, text: list[int], count: int) -> list[int]:
        followers = self.followers[row]
        for end in range(self.indexed[row], len(text)):
            for n in range(1, min(LONGEST_NGRAM, end) + 1):
                followers[tuple(text[end - n : end])] = end
        self.indexed[row] = len(text)
        last = tuple(text[-LONGEST_NGRAM:])
        found = (followers.get(last[-n:]) for n in range(len(last), 0, -1))
        start = next((at for at in found if at is not None), None)
        if start is None:
            return []
        continued = text[start:]  # may reach the end of the text, and go on with its own proposals
        for index in range(count - len(continued)):
            continued.append(continued[index])
        return continued[:count]


class ModelDraft:
    """Proposes the tokens that a model selects, computed one by one.

    Args:
        vocab_size: ids that the target model knows.
        make_cache: returns an empty KV cache of this model; None: it continues the cache of the target model, whose layers it has.
            Verification overwrites what it wrote there.
        sampler: that of the target model; None: the likeliest tokens.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        vocab_size: int,
        make_cache: Callable[[], PreallocatedCache] | None = None,
        sampler: Sampler | None = None,
    ):
        self.loaded, self.vocab_size, self.make_cache, self.sampler = loaded, vocab_size, make_cache, sampler
        self.own_vocab_size = vocab_size_of(loaded)

    def begin(self, texts: Sequence[list[int]], cache: PreallocatedCache) -> None:
        self.cache = cache if self.make_cache is None else self.make_cache()
        if self.make_cache is not None:
            next_tokens(self.loaded, self._ids(texts), self.cache, last_only=True)

    def _ids(self, texts: Sequence[list[int]]) -> torch.Tensor:
        """Return int64 [B, length]; an id that only the target model knows becomes another one."""
        return torch.tensor(texts, device=self.loaded.device).clamp(max=self.own_vocab_size - 1)

    def propose(self, texts: Sequence[list[int]], counts: Sequence[int]) -> list[list[int]]:
        cache, shortest = self.cache, min(map(len, texts))
        end = max((len(text) + count for text, count in zip(texts, counts) if count), default=0)
        if not end:
            return [[] for _ in texts]
        if self.make_cache is not None:
            cache.crop(min(0, shortest - 1 - cache.get_seq_length()))
        begin = cache.get_seq_length()
        known = self._ids([(text[begin:end] + [0] * end)[: end - begin] for text in texts])
        lengths = torch.tensor([len(text) for text in texts], device=known.device)
        ids, found = known[:, : shortest - begin], []
        for position in range(shortest, end):  # the host waits for none of these steps
            found.append(next_tokens(self.loaded, ids, cache, self.sampler, last_only=True, vocab_size=self.vocab_size))
            ids = torch.where((lengths > position)[:, None], known[:, position - begin, None], found[-1])
        if self.make_cache is None:
            cache.crop(begin - cache.get_seq_length())
        proposals = torch.cat(found, 1).tolist()
        starts = [len(text) - shortest for text in texts]
        return [row[start : start + count] for row, start, count in zip(proposals, starts, counts)]


def make_draft(loaded: LoadedModel, config: RunConfig, sampler: Sampler | None = None) -> Draft:
    """Return the draft of `--speculate`, which selects tokens by the `sampler` of the target model."""
    draft = loaded.draft
    if draft is None:
        return NgramDraft()
    vocab_size = vocab_size_of(loaded)
    if config.speculate == SELF:
        return ModelDraft(draft, vocab_size, sampler=sampler)
    return ModelDraft(draft, vocab_size, draft.cache_factory(replace(config, kv_offload=False)), sampler)


def vocab_size_of(loaded: LoadedModel) -> int:
    return loaded.model.config.get_text_config(decoder=True).vocab_size


class DraftLength:
    """Chooses the number of proposals for a pass with the most expected tokens a second, from the times and acceptance of earlier ones.

    First it tries `most`, a quarter of that and none: a pass takes longer the more tokens it verifies. Where a pass without proposals is
    expected to be the best, after `MIN_TRIALS` passes with some, there are none from then on.
    """

    def __init__(self, most: int):
        self.most, self.ended, self.trials = most, False, 0
        self.untried = [count for count in (most, most // 4, 0) for _ in range(TRIES)]
        self.pass_s: dict[int, deque[float]] = {}  # by tokens of a pass: its latest times
        self.token_s: deque[float] = deque(maxlen=LATEST)  # of the draft, for a proposal
        self.accepted = self.rejected = 0.0  # passes count the less the longer ago they were

    def next(self) -> int:
        if self.untried:
            return self.untried[0]
        if self.ended:
            return 0
        tokens_per_s = self.tokens_per_s()
        if self.trials < MIN_TRIALS:
            tokens_per_s[0] = 0.0
        best = self.most - int(np.argmax(tokens_per_s[::-1]))  # the most proposals of equally good numbers
        self.ended = best == 0
        return best

    def tokens_per_s(self) -> np.ndarray:
        """Return the expected tokens a second of a sequence, [most + 1]: with 0, 1, ... proposals for each pass."""
        widths, counts = sorted(self.pass_s), np.arange(self.most + 1)
        pass_s = np.interp(counts + 1, widths, [min(self.pass_s[each]) for each in widths])
        acceptance = self.accepted / (self.accepted + self.rejected) if self.trials else 1.0
        return np.array(expected_tokens(acceptance, self.most)) / (pass_s + counts * min(self.token_s, default=0.0))

    def observe(
        self, count: int, proposed: int, gained: int, width: int, draft_s: float, pass_s: float, is_timed: bool = True
    ) -> None:
        """Note a pass of `width` tokens with `proposed` proposals of `count` that were asked for. It gave each sequence at least `gained`
        tokens. Without `is_timed` its times do not count."""
        if is_timed:
            if self.untried and count == self.untried[0] and (proposed or not count):
                self.untried.pop(0)
            self.pass_s.setdefault(width, deque(maxlen=LATEST)).append(pass_s)
            if proposed:
                self.token_s.append(draft_s / proposed)
        if proposed:
            self.trials += 1
            accepted = max(0, gained - 1)
            self.accepted = accepted + REMEMBERED * self.accepted
            self.rejected = (accepted < proposed) + REMEMBERED * self.rejected


@torch.no_grad()
def layer_changes(loaded: LoadedModel, ids: torch.Tensor) -> list[float]:
    """Return by how much each decoder layer changes the hidden states of the texts `ids` int64 [B, T], in one pass: 1 - mean cosine
    similarity of its input and output (block influence, ShortGPT, arXiv 2403.03853)."""
    changes: list[float] = []

    def note(module: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        before = args[0] if args else kwargs["hidden_states"]  # [B, T, H]
        after = output[0] if isinstance(output, tuple) else output
        similarity = torch.nn.functional.cosine_similarity(before.float(), after.float(), dim=-1)
        changes.append(1 - float(similarity.mean()))

    with Patches() as hooks:
        for layer in decoder_layers(loaded.model)[1]:
            hooks.add_hooks(layer.register_forward_hook(note, with_kwargs=True))
        last_logits(loaded, ids.to(loaded.device))
    return changes


@dataclass
class Speculation:
    """Proposals and their verification in the decode passes of one generation.

    Attributes:
        length: chooses the number of proposals, from generation to generation; None: always `draft_len`.
        proposed, accepted: proposals by their position after the last known token, summed over the rows.
        draft_s, verify_s: seconds of drafts and of passes of the model.
    """

    draft: Draft
    draft_len: int
    length: DraftLength | None = None
    proposed: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    draft_s: float = 0.0
    verify_s: float = 0.0
    passes: int = 0
    rows: int = 1  # sequences

    def restart(self, texts: Sequence[list[int]], cache: PreallocatedCache) -> None:
        self.proposed, self.accepted = [0] * self.draft_len, [0] * self.draft_len
        self.draft_s = self.verify_s = 0.0
        self.passes, self.rows = 0, len(texts)
        self.draft.begin(texts, cache)

    def next_len(self) -> int:
        return self.draft_len if self.length is None else self.length.next()

    def propose(self, texts: Sequence[list[int]], counts: Sequence[int]) -> list[list[int]]:
        start = time.perf_counter()
        proposals = self.draft.propose(texts, counts) if any(counts) else [[] for _ in texts]
        self.draft_s += time.perf_counter() - start
        return proposals

    def accept(self, proposals: Sequence[int], predicted: Sequence[int]) -> list[int]:
        """Return the tokens that follow a text: accepted `proposals`, and the first token that the model `predicted` instead or after
        them. `predicted[i]` follows the text and i proposals."""
        accepted = self.count_accepted(proposals, predicted)
        for position in range(len(proposals)):
            self.proposed[position] += 1
            self.accepted[position] += position < accepted
        return [*proposals[:accepted], predicted[accepted]]

    def count_accepted(self, proposals: Sequence[int], predicted: Sequence[int]) -> int:
        pairs = enumerate(zip(proposals, predicted))
        return next((position for position, (one, other) in pairs if one != other), len(proposals))

    def use(self, ranks: Ranks, tokens: int) -> SpeculationUse:
        """Return the sums over all ranks, which call it together, for the record; `tokens`: decoded by each sequence."""
        proposed, accepted = (
            [sum(each) for each in zip(*ranks.gather_objects(counts))] for counts in (self.proposed, self.accepted)
        )
        draft_s, verify_s = ranks.maximum([self.draft_s, self.verify_s])
        return SpeculationUse(
            passes=self.passes,
            tokens_per_pass=tokens / self.passes if self.passes else None,
            acceptance=[right / each if each else None for right, each in zip(accepted, proposed)],
            proposals_per_pass=sum(proposed) / (ranks.world_size * self.rows * self.passes) if self.passes else None,
            turned_off=any(ranks.gather_objects(self.length is not None and self.length.ended)),
            draft_s=draft_s,
            verify_s=verify_s,
        )


def make_speculation(loaded: LoadedModel, config: RunConfig, sampler: Sampler | None = None) -> Speculation:
    most = config.most_proposals
    return Speculation(
        make_draft(loaded, config, sampler), most, DraftLength(most) if config.draft_len == AUTO else None
    )


@torch.no_grad()
def generate_speculatively(
    loaded: LoadedModel,
    ids: torch.Tensor,
    gen_len: int,
    cache: PreallocatedCache,
    speculation: Speculation,
    ranks: Ranks,
    after_pass: Callable[[int], bool],
    begin: Callable[[], None] = lambda: None,
    sampler: Sampler | None = None,
) -> torch.Tensor:
    """Return the selected ids int64 [B, gen_len], on `loaded.device`; fewer if `after_pass` ends the generation.

    Args:
        ids: int64 [B, prompt_len].
        cache: empty, for prompt_len + gen_len positions.
        after_pass: called after the prefill and each later pass with the tokens that every sequence has; returns whether to end.
        begin: called when inputs are there.
        sampler: selects the tokens; None: greedily.
    """
    texts: list[list[int]] = ids.tolist()
    prompt_len, end = ids.shape[1], ids.shape[1] + gen_len
    inputs = ids.to(loaded.device)
    begin()
    speculation.restart(texts, cache)
    for text, predicted in zip(texts, next_tokens(loaded, inputs, cache, sampler, last_only=True).tolist()):
        text += predicted
    ended = after_pass(1)
    # ranks that are done go on with the others, which gather weights with them
    while not ended and ranks.maximum([float(min(map(len, texts)) < end)])[0]:
        shortest = min(map(len, texts))
        cached, draft_len = shortest - 1, speculation.next_len()
        draft_s, settling_steps = speculation.draft_s, _settling_steps(loaded)
        most = max(1, min(draft_len + 1, end - 1 - cached))
        known = [text[cached:][:most] for text in texts]
        counts = [most - len(each) for each in known]
        with _span(loaded, f"draft of {max(counts)}"):
            proposals = speculation.propose(texts, counts)
        rows = [each + proposed for each, proposed in zip(known, proposals)]
        width = max(len(row) for row, text in zip(rows, texts) if len(text) < end or shortest == end)
        padded = torch.tensor([(row + row[-1:] * width)[:width] for row in rows], device=loaded.device)
        start = time.perf_counter()
        with _span(loaded, f"pass of {width}"):
            predictions = next_tokens(loaded, padded, cache, sampler).tolist()
        pass_s = time.perf_counter() - start
        speculation.verify_s += pass_s
        speculation.passes += 1
        for text, proposed, predicted in zip(texts, proposals, predictions):
            before = len(text) - cached  # tokens of this pass that were known
            if len(text) < end and before <= width:  # else it is so far ahead that not all of its tokens were fed
                text += speculation.accept(proposed, predicted[before - 1 :])
        cache.crop(min(map(len, texts)) - 1 - cached - width)
        if speculation.length is not None:
            speculation.length.observe(
                draft_len,
                proposed=max(map(len, proposals)),
                gained=min(map(len, texts)) - shortest,
                width=width,
                draft_s=speculation.draft_s - draft_s,
                pass_s=pass_s,
                is_timed=_settling_steps(loaded) == settling_steps,
            )
        ended = after_pass(min(map(len, texts)) - prompt_len)
    shortest = min(map(len, texts))
    return torch.tensor([text[prompt_len:shortest] for text in texts], device=loaded.device)


def _settling_steps(loaded: LoadedModel) -> int:
    return loaded.settling_steps() + (0 if loaded.draft is None else loaded.draft.settling_steps())


def _span(loaded: LoadedModel, name: str) -> AbstractContextManager[Any]:
    """Return a context that a trace shows as `name`: the engine's own, or PyTorch's."""
    return record_function(name) if loaded.timeline is None else loaded.timeline.span(name)


@cache_per_module
def _arguments(model: torch.nn.Module) -> frozenset[str]:
    return frozenset(inspect.signature(type(model).forward).parameters)


def last_logits(loaded: LoadedModel, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits [B, V] after the texts `ids` int64 [B, T], without a KV cache."""
    given = {"logits_to_keep": 1} if "logits_to_keep" in _arguments(loaded.model) else {}
    return loaded.model(input_ids=ids, use_cache=False, **given).logits[:, -1]


def next_tokens(
    loaded: LoadedModel,
    ids: torch.Tensor,
    cache: PreallocatedCache,
    sampler: Sampler | None = None,
    last_only: bool = False,
    vocab_size: int | None = None,
) -> torch.Tensor:
    """Return the selected token after each of `ids` int64 [B, W], which follow the positions of `cache`: int64 [B, W].

    Args:
        sampler: selects the tokens; None: the likeliest.
        last_only: only after the last ones, [B, 1].
        vocab_size: select among the ids below it; None: among all.
    """
    start, taken = cache.get_seq_length(), _arguments(loaded.model)
    given: dict[str, Any] = {}
    if "position_ids" in taken:
        given["position_ids"] = torch.arange(start, start + ids.shape[1], device=ids.device).expand_as(ids)
    if "logits_to_keep" in taken and last_only:
        given["logits_to_keep"] = 1
    logits = loaded.model(input_ids=ids, past_key_values=cache, use_cache=True, **given).logits
    logits = (logits[:, -1:] if last_only else logits)[..., :vocab_size]
    if sampler is None:
        return logits.argmax(-1)
    return sampler.select(logits, start + ids.shape[1] - logits.shape[1] + 1)
