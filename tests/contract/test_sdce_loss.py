"""The loss of SDCE and its n-gram baseline against slow references, and what a step asks of the device."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ml_factory.errors import SettingsError
from ml_factory.recipes.sdce import KINDS, SurrogateLoss, next_token_loss, surrogate_loss, surrogate_weight
from tests.contract.doors import Device, TrainingState, TrainSpec, ngram_losses, take_training_step

B, T, V, K = 3, 7, 11, 4
CPU = Device("cpu", 1)


def case(seed: int, dtype: torch.dtype = torch.float64):
    """Logits, labels with ignored ones, distinct surrogate tokens of which some are absent, log-probabilities."""
    drawn = np.random.default_rng(seed)
    logits = torch.tensor(drawn.normal(0, 2, (B, T, V)), dtype=dtype)
    labels = torch.tensor(drawn.integers(0, V, (B, T)))
    labels[drawn.random((B, T)) < 0.2] = -100
    ids = torch.tensor(np.stack([[drawn.permutation(V)[:K] for _ in range(T)] for _ in range(B)]).astype(np.int32))
    ids[torch.tensor(drawn.random((B, T, K)) < 0.15)] = -1
    probabilities = drawn.dirichlet(np.full(K + 1, 0.3), (B, T))[..., :K]
    return logits, labels, ids, torch.log(torch.tensor(probabilities, dtype=dtype).clamp_min(1e-12))


def reference(logits, labels, ids, logprobs, weight, kind, threshold=0.02):
    """Every position in turn; position t predicts label t + 1."""
    losses = []
    for b in range(len(labels)):
        for t in range(labels.shape[1] - 1):
            label = int(labels[b, t + 1])
            if label == -100:
                continue
            scores = [float(x) for x in logits[b, t].double()]
            normaliser = math.log(sum(math.exp(x) for x in scores))
            top = [(int(i), math.exp(float(p))) for i, p in zip(ids[b, t], logprobs[b, t].double(), strict=True)]
            kept = [(i, p) for i, p in top if i >= 0 and p >= threshold and not (kind == "surrogate" and i == label)]
            term = 0.0
            if kind == "surrogate" and kept:
                shares = [math.exp(-1 / p) for _, p in kept]
                term = sum(s / sum(shares) * (normaliser - scores[i]) for s, (i, _) in zip(shares, kept, strict=True))
            if kind == "kl" and kept:
                total = sum(p for _, p in kept)
                term = sum(p / total * (math.log(p / total) + normaliser - scores[i]) for i, p in kept)
            losses.append(normaliser - scores[label] + weight * term)
    return sum(losses) / len(losses)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(5))
def test_surrogate_loss_equals_slow_reference(kind, seed):
    inputs = case(seed)
    for weight, threshold in ((1.0, 0.02), (0.3, 0.25), (0.0, 0.02)):
        found = float(surrogate_loss(*inputs, weight, kind, threshold=threshold))
        assert abs(found - reference(*inputs, weight, kind, threshold)) < 1e-9
    single = case(seed, torch.float32)
    assert abs(float(surrogate_loss(*single, 0.7, kind)) - reference(*single, 0.7, kind)) < 1e-6


def test_surrogate_loss_gradient_is_finite_where_probabilities_are_zero_or_labels_all_ignored():
    logits, labels, ids, logprobs = case(4, torch.float32)
    logprobs[:, ::2] = -math.inf
    for kind in KINDS:
        free = logits.clone().requires_grad_()
        surrogate_loss(free, labels, ids, logprobs, 1.0, kind).backward()
        assert torch.isfinite(free.grad).all() and free.grad[:, -1].abs().sum() == 0
    assert float(surrogate_loss(logits, torch.full_like(labels, -100), ids, logprobs, 1.0)) == 0.0


def test_surrogate_loss_unknown_kind_proposes_nearest():
    with pytest.raises(SettingsError, match="did you mean 'surrogate'"):
        surrogate_loss(*case(0), 1.0, "surrogat")


def test_surrogate_weight_is_cosine_from_initial_to_final():
    weights = [surrogate_weight(step, 11, 1.0, 0.2) for step in range(11)]
    assert weights[0] == 1.0 and weights[-1] == pytest.approx(0.2) and weights[5] == pytest.approx(0.6)
    assert weights == sorted(weights, reverse=True) and surrogate_weight(0, 1, 1.0, 0.0) == 1.0
    given = [SurrogateLoss("surrogate", 1.0, 0.2).step_numbers(step, 11).item() for step in range(11)]
    assert given == pytest.approx(weights)


class Bigram(nn.Module):
    """Logits of the next token from the last one."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(V, V))

    def forward(self, tokens):
        return self.table[tokens]


def sequences(rows: int = 8):
    drawn = np.random.default_rng(0)
    tokens = torch.tensor(drawn.integers(0, V, (rows, T)).astype(np.int32))
    ids = torch.tensor(drawn.integers(0, V, (rows, T, K)).astype(np.int32))
    return tokens, ids, torch.full((rows, T, K), -1.5), torch.ones(rows)


class WaitsForDevice(TorchDispatchMode):
    """Operations that read a value of the device on the host."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "is_nonzero")

    def __init__(self):
        super().__init__()
        self.seen, self.waits = 0, []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.seen += 1
        if operation.__name__.partition(".")[0] in self.WAITING:
            self.waits.append(operation.__name__)
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", KINDS)
def test_training_step_with_surrogate_loss_does_not_wait_for_device(kind):
    arrays, spec = sequences(), TrainSpec(epochs=1, batch=4, accumulate=2)
    state = TrainingState(Bigram(), 8, spec, CPU, {"model": "bigram"})
    with WaitsForDevice() as watched:
        take_training_step(
            state, lambda rows: tuple(one[torch.from_numpy(rows)] for one in arrays), SurrogateLoss(kind)
        )
    assert watched.seen > 50 and watched.waits == []
    with WaitsForDevice() as watched:
        bool(torch.ones(1).sum() > 0)
    assert watched.waits


def test_next_token_loss_leaves_out_sequences_of_weight_zero():
    tokens, _, _, weights = sequences(4)
    network = Bigram()
    nn.init.normal_(network.table)
    total, count = next_token_loss(network, (tokens, weights * torch.tensor([1.0, 0.0, 1.0, 0.0])))
    kept = tokens[[0, 2]].long()
    expected = nn.functional.cross_entropy(network(kept[:, :-1]).flatten(0, 1), kept[:, 1:].flatten(), reduction="sum")
    assert float(count) == 2 * (T - 1) and total.item() == pytest.approx(expected.item(), rel=1e-6)


# ---- the n-gram baseline ---------------------------------------------------------------------------------------------


def chance(token: int, context: tuple, train: list[tuple], vocabulary: int) -> float:
    """Witten-Bell's probability of a token after a context; rows begin with as many None as the longest context."""
    shorter, count = 1 / vocabulary, len(context)
    if context:
        shorter = chance(token, context[1:], train, vocabulary)
    seen = Counter(row[at] for row in train for at in range(4, len(row)) if row[at - count : at] == context)
    return (seen[token] + len(seen) * shorter) / (seen.total() + len(seen)) if seen else shorter


def test_ngram_model_equals_its_definition():
    drawn = np.random.default_rng(0)
    train, held_out = drawn.integers(0, 6, (12, 15)), drawn.integers(0, 8, (5, 15))
    rows, others = ([(None,) * 4 + tuple(row) for row in part.tolist()] for part in (train, held_out))
    wanted = [
        np.mean([-math.log(chance(row[at], row[at - order : at], rows, 9)) for row in others for at in range(5, 19)])
        for order in range(4)
    ]
    assert ngram_losses(train, held_out, 9)[:4] == pytest.approx(wanted, rel=1e-12)


def test_ngram_model_learns_a_cycle():
    rows = np.tile(np.arange(5), (20, 8))
    losses = ngram_losses(rows, rows, 5)[:2]
    assert losses[0] == pytest.approx(math.log(5), abs=0.01) and losses[1] < 0.05
