"""A tokenizer that is trained from rows, by the trainer of tokenizers."""

from collections.abc import Sequence
from typing import Any

from ml_factory.lazy_module import LazyModule

tokenizers, transformers = LazyModule("tokenizers"), LazyModule("transformers")

PAD, END, UNKNOWN = "<pad>", "</s>", "<unk>"  # ids 0, 1, 2, as in T5


def train_tokenizer(texts: Sequence[str], vocabulary: int, positions: int) -> Any:
    """Return a tokenizer of transformers with at most so many pieces, a function of the texts alone.

    The pieces are those of byte-pair encoding, whose trainer is deterministic; that of tokenizers for unigrams is not.
    """
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=UNKNOWN))
    made.normalizer = tokenizers.normalizers.NFKC()
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    made.decoder = tokenizers.decoders.Metaspace()
    made.train_from_iterator(texts, tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[PAD, END, UNKNOWN], show_progress=False))  # fmt: skip
    made.post_processor = tokenizers.processors.TemplateProcessing(single=f"$A {END}", special_tokens=[(END, 1)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token=PAD, eos_token=END, unk_token=UNKNOWN, model_max_length=positions
    )
