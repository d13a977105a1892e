"""Rivals of a cache rank: synchronous sparse attention in SGLang's own engine, a plugin of its own.

Quest (arXiv 2406.10774), TOVA (arXiv 2401.06104), a window, and an oracle select on the inference
rank, with the current query, before each layer's attention. They share --sparse-budget,
--sink-tokens, --recent-tokens and --dense-layers with a cache rank.

    plugin.py      the flag --decode-mode, and what SGLang has to know; rounding, as in an FP8 cache
    launch.py      python -m scripts.baselines.launch --decode-mode quest
    attention.py   the decode attention backend
    selection.py   what each mode attends to
    reference.py   scores and selection by the current query, plain torch
    kernels.py     the same for Quest on a GPU, Triton

drafting.py lets the drafts of a server on a CPU select in other ways, for what they select.
"""

import sglang_ext  # noqa: F401  (makes SGLang importable without a GPU)
