"""Surrogate-guided cross-entropy (SDCE): next-token loss plus the likely tokens of a second, frozen language model.

B sequences, T positions, V tokens of the vocabulary, K tokens that the surrogate finds most likely at a position.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ml_factory.errors import check_known

KINDS = ("surrogate", "kl", "standard")
THRESHOLD = 0.02  # least probability of a surrogate's token that takes part
IGNORED = -100  # label of a position that is not learned

TopTokens = Callable[[Tensor], tuple[Tensor, Tensor]]  # tokens_BT -> (ids_BTK, logprobs_BTK)


def surrogate_loss(
    logits_BTV: Tensor, labels_BT: Tensor, ids_BTK: Tensor, logprobs_BTK: Tensor, weight: Tensor | float,
    kind: str = "surrogate", *, threshold: float = THRESHOLD,
) -> Tensor:  # fmt: skip
    """Return the mean over the label positions of CE + weight * (term of the surrogate), a scalar.

    All inputs stand at the position that predicts: position t of logits, ids and logprobs belongs to label t + 1, as
    in Hugging Face's causal models, so the last position of those and the first label are not used.

    labels_BT : int64 tokens; -100 for a position that is not learned.
    ids_BTK : integer tokens of the model's vocabulary, distinct at a position; negative for one that it lacks.
    logprobs_BTK : natural logarithms of the surrogate's probabilities of these tokens.
    weight : of the term at this step, see `surrogate_weight`.
    kind : "surrogate": sum over k of softmax(-perplexity_k) * NLL_k, where the perplexity of a token is the inverse of
        the surrogate's probability, and the label itself is left out; "kl": KL(surrogate || model), the surrogate's
        probabilities scaled to a sum of 1 over the tokens that take part; "standard": no term.
    threshold : tokens of a lower probability are left out; a position without any token has a term of 0.
    """
    check_known("Unknown loss", "loss_type", kind, KINDS)
    total, count = _surrogate_loss_sums(logits_BTV, labels_BT, ids_BTK, logprobs_BTK, weight, kind, threshold=threshold)
    return (total / count.clamp_min(1)).sum()


def _surrogate_loss_sums(
    logits_BTV: Tensor, labels_BT: Tensor, ids_BTK: Tensor | None, logprobs_BTK: Tensor | None,
    weight: Tensor | float, kind: str, *, threshold: float = THRESHOLD,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return (sum of the loss over label positions, number of them), of all sequences; see `surrogate_loss`.

    ids_BTK, logprobs_BTK : None where `kind` is "standard".
    """
    logits_BTV, labels_BT = _at_least_float32(logits_BTV[:, :-1]), labels_BT[:, 1:]
    counts_BT = labels_BT != IGNORED
    target_BT = labels_BT.clamp_min(0)
    # One log-normaliser a position gives the NLL of every token, without a second tensor of the vocabulary's size.
    normaliser_BT = logits_BTV.logsumexp(dim=-1)
    loss_BT = normaliser_BT - logits_BTV.gather(-1, target_BT[..., None]).squeeze(-1)
    if kind != "standard":
        assert ids_BTK is not None and logprobs_BTK is not None
        ids_BTK, logprobs_BTK = ids_BTK[:, :-1].long(), _at_least_float32(logprobs_BTK[:, :-1])
        lowest = math.log(threshold) if threshold > 0 else torch.finfo(logprobs_BTK.dtype).min
        kept_BTK = (ids_BTK >= 0) & (logprobs_BTK >= lowest)
        nll_BTK = normaliser_BT[..., None] - logits_BTV.gather(-1, ids_BTK.clamp_min(0))
        if kind == "surrogate":
            perplexity_BTK = torch.exp(-logprobs_BTK.clamp_min(-80.0))
            term_BTK = _softmax_of_kept(-perplexity_BTK, kept_BTK & (ids_BTK != target_BT[..., None])) * nll_BTK
        else:  # KL(q || model), q the surrogate's probabilities of the kept tokens scaled to 1
            q_BTK = _softmax_of_kept(logprobs_BTK, kept_BTK)
            term_BTK = q_BTK * (torch.log(q_BTK.clamp_min(1e-30)) + nll_BTK)
        loss_BT = loss_BT + weight * term_BTK.sum(dim=-1)
    return torch.where(counts_BT, loss_BT, torch.zeros_like(loss_BT)).sum(), counts_BT.sum()


def _at_least_float32(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()


def _softmax_of_kept(scores_BTK: Tensor, kept_BTK: Tensor) -> Tensor:
    """Return softmax over the kept entries; 0 at the others, and everywhere where none is kept."""
    lowest = torch.finfo(scores_BTK.dtype).min
    return torch.softmax(scores_BTK.masked_fill(~kept_BTK, lowest), dim=-1) * kept_BTK


def surrogate_weight(step: int, steps: int, initial: float, final: float) -> float:
    """Return the weight of the surrogate's term at step 0 .. steps - 1: a cosine from `initial` to `final`."""
    share = min(step / max(steps - 1, 1), 1.0)
    return final + (initial - final) * 0.5 * (1 + math.cos(math.pi * share))


class SurrogateLoss:
    """The loss as the training loop calls it: (network, (tokens_BT[, ids, logprobs], weight_B, numbers)).

    kind, threshold : as of `surrogate_loss`.
    initial, final : weights of the surrogate's term at the first and the last step.
    top_tokens : function that computes the surrogate's tokens in the step; None where the batch holds them, or `kind`
        is "standard".
    """

    def __init__(
        self, kind: str = "surrogate", initial: float = 1.0, final: float = 0.0, *, threshold: float = THRESHOLD,
        top_tokens: TopTokens | None = None,
    ):  # fmt: skip
        self.kind, self.initial, self.final = kind, initial, final
        self.threshold, self.top_tokens = threshold, top_tokens

    def step_numbers(self, step: int, steps: int) -> Tensor:
        """Return the weight of the surrogate's term at this step, float32 (1,) on the host."""
        return torch.tensor([surrogate_weight(step, steps, self.initial, self.final)], dtype=torch.float32)

    def __call__(self, network: nn.Module, batch: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        tokens_BT, *top, weight_B, numbers = batch
        labels_BT = _labels(tokens_BT, weight_B)
        ids_BTK, logprobs_BTK = top or ((None, None) if self.top_tokens is None else self.top_tokens(tokens_BT))
        logits_BTV = network(tokens_BT.long())
        return _surrogate_loss_sums(
            logits_BTV, labels_BT, ids_BTK, logprobs_BTK, numbers[0], self.kind, threshold=self.threshold
        )


def next_token_loss(network: nn.Module, batch: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """Return (sum of the cross-entropy over label positions, number of them) of (tokens_BT, ..., weight_B)."""
    tokens_BT, weight_B = batch[0], batch[-1]
    return _surrogate_loss_sums(network(tokens_BT.long()), _labels(tokens_BT, weight_B), None, None, 0.0, "standard")


def _labels(tokens_BT: Tensor, weight_B: Tensor) -> Tensor:
    """Return the tokens as labels; sequences of weight 0 (padding of a batch) and negative tokens are not learned."""
    learned_BT = (tokens_BT >= 0) & (weight_B > 0)[:, None]
    return torch.where(learned_BT, tokens_BT.long(), IGNORED)
