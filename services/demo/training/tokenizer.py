"""The tokenizer: byte-level BPE whose merges are learnt from the captions.

Learnt here and not by the trainer of ``tokenizers``, which breaks ties by chance: each run would get other tokens.
"""

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

from tokenizers import pre_tokenizers
from transformers import CLIPTokenizer

MAX_LENGTH = 20  # tokens; the longest name and its opening fit
MERGES = 2000
START, END, WORD_END = "<|startoftext|>", "<|endoftext|>", "</w>"


def new_tokenizer(words: Iterable[str]) -> CLIPTokenizer:
    """A tokenizer that knows the most frequent pieces of ``words`` (lower case), and every byte besides."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = _learn_merges(Counter(words))
    pieces = [START, END, *alphabet, *(letter + WORD_END for letter in alphabet), *(one + two for one, two in merges)]
    return CLIPTokenizer(
        vocab={piece: number for number, piece in enumerate(dict.fromkeys(pieces))},
        merges=merges,
        model_max_length=MAX_LENGTH,
    )


def _learn_merges(counts: Counter[str]) -> list[tuple[str, str]]:
    """The pairs to merge, most frequent first; among equals the one that sorts first."""
    splits = {word: [*word[:-1], word[-1] + WORD_END] for word in counts}
    merges = []
    while len(merges) < MERGES:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, split in splits.items():
            for pair in pairwise(split):
                pairs[pair] += counts[word]
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        for word, split in splits.items():
            splits[word] = _merged(split, best)
    return merges


def _merged(split: list[str], pair: tuple[str, str]) -> list[str]:
    merged, place = [], 0
    while place < len(split):
        if tuple(split[place : place + 2]) == pair:
            merged.append("".join(pair))
            place += 2
        else:
            merged.append(split[place])
            place += 1
    return merged
