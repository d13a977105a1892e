"""The options of `mosaickv`: which strategies there are, which segments have them, what is scored.

    rate        percent of its elements that a vector loses
    group       neighbouring elements that are kept together
    block       tokens of a per-block key; 1 is none
    dropped     percent of the rotated channels that all vectors lose, those of least energy
    loss        largest share of energy that a rate and a group may lose to be chosen
    variance    largest share of the variance of keys within blocks that may be chosen
    segment     most tokens of a segment: longer ones take more memory a slot, for the copy in full
                precision, and shorter ones more memory a token, for their rotations
    threshold   accumulated loss that ends a segment, in tokens that are lost altogether
    scored      percent of the tokens that are scored one by one, those of the best blocks; never
                fewer than can be selected

With `auto`, each layer of each segment has the one that compresses most within `loss` or within
`variance`, and memory is reserved for the one that compresses least.

The paper drops a quarter of the channels and scores blocks first (sections 5.2 and 4.2). Both
together lose a fifth of the recall on the keys of a language model, and an eighth of the attention,
so that neither is the default; docs/results.md has the figures.
"""

from __future__ import annotations

from cache_rank.residency.options import Between, OneOf, Ranges

OPTIONS: Ranges = {
    "rate": OneOf(("auto", 0, 62.5, 75, 87.5)),
    "group": OneOf(("auto", 1, 2, 4)),
    "block": OneOf((1, 4, 8, 16, "auto")),
    "dropped": Between(0, 75, default=0),
    "loss": Between(0, 1, default=0.05),
    "variance": Between(0, 1, default=0.5),
    "segment": OneOf((8192, 512, 1024, 2048, 4096, 16384, 32768, 65536)),
    "threshold": Between(0, 65536, default=1024),
    "scored": Between(0, 100, default=25),
}
