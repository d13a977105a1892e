"""A tokenizer of whole words."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

BOS, EOS, UNK = SPECIAL_TOKENS = ("<bos>", "<eos>", "<unk>")
# Chat completions encode the rendered template without special tokens, so that it has to emit BOS.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ message['content'] }}{{ '' if loop.last else ' ' }}{% endfor %}"
)


def make_tokenizer(words: Sequence[str], max_length: int) -> PreTrainedTokenizerFast:
    """One token a word; `<bos>` is added to every text that is encoded with special tokens.

    Args:
        words: the task's, in the order of their ids, which begin after the special tokens.
        max_length: longest sequence of the model, in tokens.
    """
    vocabulary = {word: i for i, word in enumerate([*SPECIAL_TOKENS, *words])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=UNK))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.post_processor = TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, vocabulary[BOS])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        pad_token=EOS,
        padding_side="left",
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
