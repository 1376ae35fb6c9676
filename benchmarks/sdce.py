"""Comparison of three losses with three seeds each (does SDCE help?), and tokens/s with and without the cache.

    python -m benchmarks.sdce losses --text FILE.txt [--tokens 400000] [--epochs 3] [--surrogate builtin:small]
    python -m benchmarks.sdce speed --text FILE.txt

losses: a surrogate is trained on the training rows by cross-entropy alone, then builtin:tiny with each loss, on one
thread. Nats a token of the held-out rows; intervals of the difference to cross-entropy by Student over seeds.
speed: builtin:small with builtin:medium as surrogate; steps of both kinds in turns.
"""

import argparse
import statistics
import tempfile
from pathlib import Path

import numpy as np
import torch

from benchmarks.measure import best, digits, in_turns, print_json
from ml_factory.recipes.language_models import load_causal_model, open_text, pack_tokens
from ml_factory.recipes.sdce import KINDS, SurrogateLoss
from ml_factory.recipes.sdce_run import run_sdce
from ml_factory.recipes.surrogate import SurrogateTopTokens, cache_top_tokens, join_vocabularies
from ml_factory.training.batches import BatchLoader
from ml_factory.training.device import deterministic_device, pick_device
from ml_factory.training.loop import take_training_step
from ml_factory.training.spec import TrainSpec
from ml_factory.training.state import TrainingState

LENGTH, SEEDS, STUDENT_2 = 128, (0, 1, 2), 4.303  # the 97.5 % point of Student's distribution with 2 degrees of freedom


def losses(text: str, tokens: int, epochs: int, surrogate: str, surrogate_epochs: int) -> None:
    """Print the held-out loss of each kind and seed, and the differences to cross-entropy."""
    with tempfile.TemporaryDirectory() as folder:

        def trained(name: str, **values: object) -> dict:
            common = {
                "base_model": "builtin:tiny", "surrogate_dtype": "float32", "surrogate_cache": "float32",
                "cache_dir": f"{folder}/cache", "dataset": text, "max_seq_length": LENGTH, "max_tokens": tokens,
                "num_epochs": epochs, "threads": 1, "batch_size": 16, "learning_rate": 3e-3,
                "gradient_accumulation_steps": 1, "output_dir": f"{folder}/{name}",
            }  # fmt: skip
            return run_sdce(**common | values, mirror="off", on_status=lambda line: None)

        first = trained("surrogate", base_model=surrogate, loss_type="standard", num_epochs=surrogate_epochs, seed=99)
        print_json(bench="sdce surrogate", loss=digits(first["loss"]),
                    ngram_order=first["ngram_order"], ngram_loss=digits(first["ngram_loss"]))  # fmt: skip
        found: dict[str, list[float]] = {}
        for kind in KINDS:
            runs = [
                trained(f"{kind}{seed}", surrogate_model=first["model"], loss_type=kind, seed=seed) for seed in SEEDS
            ]
            found[kind] = [run["loss"] for run in runs]
            print_json(bench=f"sdce {kind}", losses=[round(loss, 4) for loss in found[kind]],
                        mean=round(statistics.mean(found[kind]), 4))  # fmt: skip
    for kind in ("surrogate", "kl"):
        differences = [one - other for one, other in zip(found[kind], found["standard"], strict=True)]
        mean = statistics.mean(differences)
        half = STUDENT_2 * statistics.stdev(differences) / len(SEEDS) ** 0.5
        verdict = "helps" if mean + half < 0 else "harms" if mean - half > 0 else "no difference shown"
        print_json(bench=f"sdce {kind} minus standard", mean=round(mean, 4),
                    low=round(mean - half, 4), high=round(mean + half, 4), verdict=verdict)  # fmt: skip


def speed(text: str, steps: int = 4) -> None:
    """Print tokens/s of training steps that compute the surrogate's tokens, and of those that read them from disk."""
    spec = TrainSpec(batch=16, precision="fp32", threads=1)
    device = pick_device(spec)
    names = {"model": "builtin:small", "surrogate": "builtin:medium"}
    models = {name: load_causal_model(size, LENGTH) for name, size in names.items()}
    tokenizer = models["model"].tokenizer
    with tempfile.TemporaryDirectory() as folder, deterministic_device(device):
        rows = pack_tokens(open_text(text), tokenizer, LENGTH, f"{folder}/tokens", most=16 * LENGTH * 8)
        join = join_vocabularies(tokenizer, tokenizer)
        top_tokens = SurrogateTopTokens(models["surrogate"].network, join, 30, tokenizer.end, device, 1)
        cached = [np.array(one) for one in cache_top_tokens(rows, top_tokens, Path(folder) / "cache")]
        weights = np.ones(len(rows), np.float32)
        sides, trained = {}, {}
        for name, parts, online in (("online", [], top_tokens), ("cached", cached, None)):
            feed = BatchLoader(device, [np.array(rows), *parts, weights])
            run = TrainingState(
                load_causal_model(names["model"], LENGTH).network, len(rows), spec, device, {"model": "sdce"}
            )
            loss = SurrogateLoss(threshold=0.001, top_tokens=online)
            sides[name] = lambda run=run, feed=feed, loss=loss: [
                take_training_step(run, feed, loss) for _ in range(steps)
            ]
            trained[name] = run
        taken = in_turns(sides, 3)
        equal = all(
            torch.equal(one, trained["cached"].network.state_dict()[name])
            for name, one in trained["online"].network.state_dict().items()
        )
    counts = {name: sum(one.numel() for one in model.network.parameters()) for name, model in models.items()}
    rates = {name: round(steps * 16 * LENGTH / best(runs).wall) for name, runs in taken.items()}
    print_json(bench="sdce cache", weights=counts, tokens_per_s=rates, equal_bits=equal,
                times_wall=digits(best(taken["online"]).wall / best(taken["cached"]).wall),
                times_cpu=digits(best(taken["online"]).cpu / best(taken["cached"]).cpu))  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("losses", "speed"))
    parser.add_argument("--text", required=True)
    parser.add_argument("--tokens", type=int, default=400_000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--surrogate", default="builtin:small")
    parser.add_argument("--surrogate-epochs", type=int, default=6)
    given = parser.parse_args()
    if given.what == "losses":
        losses(given.text, given.tokens, given.epochs, given.surrogate, given.surrogate_epochs)
    else:
        speed(given.text)


if __name__ == "__main__":
    main()
