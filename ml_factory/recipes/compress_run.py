"""recipe compress: variants of a trained network, each trained, stored and loaded again; one table, one picture."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ml_factory.errors import FactoryError, SettingsError, did_you_mean
from ml_factory.evaluation.compression_plots import draw_compression
from ml_factory.models.registry import available_models
from ml_factory.recipes.compression.market_subject import MarketSubject
from ml_factory.recipes.compression.pruning import prune_by_magnitude, share_of_zeros
from ml_factory.recipes.compression.t5_subject import T5Subject
from ml_factory.recipes.compression.variant_file import INT8, Variant, load_variant, save_variant
from ml_factory.recipes.recipe_run import RESULT, agree_on_run, open_run_of_process
from ml_factory.runs import RunFolder
from ml_factory.storage.files import files
from ml_factory.storage.json_values import fingerprint_json
from ml_factory.storage.workspace import Workspace
from ml_factory.training.device import deterministic_device, pick_device
from ml_factory.training.loop import Validation, run_training_loop
from ml_factory.training.spec import TrainSpec

NAME, FILE, ORIGINAL = "compress", "variant.state", "original"
METHODS = ("magnitude", "structured", "distill", *INT8)
DEFAULT = "magnitude:0.5,structured:0.5,int8_dynamic,int8_weights,distill:0.5"
TOLERANCE = 1e-5  # between the reported quality and that of the file
TEMPERATURE, HARD = 2.0, 0.5  # of the original's probabilities; share of the labels in the loss
Subject = MarketSubject | T5Subject
Status = Callable[[str], object]


@dataclass(frozen=True)
class CompressionSettings:
    """Settings of a compression: the network and the methods.

    model : folder of a finished run of recipe t5, or the name of a network of a market.
    symbol, horizon : of the market.
    methods : such as magnitude:0.5, structured:0.5 or int8_dynamic, separated by commas.
    recovery_epochs : of training after pruning, at recovery_rate of the first learning rate.
    distill_epochs : of a student's training.
    rounds : predictions that are timed.
    """

    model: str = ""
    symbol: str = ""
    horizon: int = 5
    methods: str = DEFAULT
    recovery_epochs: int = 1
    recovery_rate: float = 0.3
    distill_epochs: int = 4
    rounds: int = 60
    device: str = "auto"
    threads: int = 0

    def __post_init__(self) -> None:
        for method in self.methods.split(","):
            parse_method(method)


def parse_method(text: str) -> tuple[str, float]:
    """Return a method's name and the share that it removes, 0 for a number format. Raises SettingsError."""
    name, _, share = text.strip().partition(":")
    if name not in METHODS:
        raise SettingsError("There is no such method", where="methods", got=repr(name), wanted=", ".join(METHODS),
                            next_step=did_you_mean(name, METHODS))  # fmt: skip
    if name in INT8 and not share:
        return name, 0.0
    try:
        removed = float(share or "0.5")
    except ValueError:
        removed = 0.0
    if name in INT8 or not 0 < removed < 1:
        wanted = name if name in INT8 else f"{name}:0.5"
        raise SettingsError("A method removes a share", where="methods", got=repr(text), wanted=wanted)
    return name, removed


def open_subject(workspace: Workspace, settings: CompressionSettings) -> Subject:
    """Return the trained network. Raises SettingsError, NotPreparedError."""
    device = pick_device(TrainSpec(device=settings.device, threads=settings.threads, precision="fp32"))
    if settings.model in available_models():
        if not settings.symbol:
            raise SettingsError(
                "Which market?", where="--symbol", got="none", wanted="the symbol that it was trained on"
            )
        return MarketSubject(workspace, settings.symbol, settings.horizon, settings.model, device)
    folder = Path(settings.model).expanduser()
    if not settings.model or not files.is_file(folder / RESULT):
        raise SettingsError("There is no finished run here", where="--model", got=settings.model or "none",
                            wanted="the folder of a run of recipe t5, or the name of a network",
                            next_step=did_you_mean(settings.model, available_models()))  # fmt: skip
    facts = files.read_json(folder / RESULT)
    recipe = facts.get("recipe") if isinstance(facts, dict) else None
    if recipe != "t5":
        raise SettingsError("This recipe cannot be compressed", where=folder / RESULT, got=recipe, wanted="t5")
    try:
        return T5Subject(folder, facts, device)
    except (KeyError, TypeError, AttributeError) as error:
        raise SettingsError("This result is damaged", where=folder / RESULT, got=repr(error)[:200],
                            next_step="train again") from error  # fmt: skip


def run_compress(
    workspace: Workspace, settings: CompressionSettings, *, fresh: bool = False, on_status: Status = print
) -> dict[str, Any]:
    """Make every variant, or load those that are finished; measure all of them; return the table.

    Raises FactoryError where a file predicts otherwise than was reported.
    """
    subject = open_subject(workspace, settings)
    with deterministic_device(subject.device):
        rows = []
        for method in (ORIGINAL, *(one.strip() for one in settings.methods.split(","))):
            row, variant = make_or_load_variant(workspace, subject, settings, method, fresh, on_status)
            outcomes_N = subject.outcomes(variant.network)
            if abs(float(outcomes_N.mean()) - row["quality"]) > TOLERANCE:
                raise FactoryError("A file predicts otherwise than was reported", where=row["file"],
                                   got=float(outcomes_N.mean()), wanted=row["quality"],
                                   next_step="delete its run and compress again")  # fmt: skip
            on_status(f"{method}: {subject.quality} {row['quality']:.4f}, {row['bytes'] / 1e6:.2f} MB")
            rows.append((row, variant.network, outcomes_N))
        latencies = measure_latencies([network for _, network, _ in rows], subject.one_prediction(), settings.rounds)
        table = _table(subject, [row for row, _, _ in rows], latencies, [outcomes for _, _, outcomes in rows])
        facts = {"recipe": NAME, "subject": subject.name, "quality": subject.quality, "rows": table,
                 "test_rows": len(rows[0][2]), "settings": asdict(settings)}  # fmt: skip
        folder = workspace.results / NAME / f"table-{fingerprint_json([subject.fingerprint, settings.methods])[:12]}"
        facts["folder"] = str(folder)
        write_table(folder, facts)
    workspace.push()
    return facts


def make_or_load_variant(
    workspace: Workspace, subject: Subject, settings: CompressionSettings, text: str, fresh: bool, say: Status
) -> tuple[dict[str, Any], Variant]:
    """Return a variant as its file has it, and what was reported of it; made and trained where it is not finished."""
    spec = recovery_spec(subject, settings, text)
    identity = {"subject": subject.fingerprint, "method": text, "training": spec.identity()}
    run, done = agree_on_run(workspace, NAME, identity, subject.device.processes, fresh)
    path = run.folder / FILE
    if done is None:
        say(f"{text}: {run.folder}")
        done = _make_variant(workspace, run, subject, spec, text, path)
    return done | {"file": str(path)}, load_variant(path, subject.name, subject.build)


def recovery_spec(subject: Subject, settings: CompressionSettings, text: str) -> TrainSpec:
    """Return the settings of the training that follows a method."""
    training = replace(subject.training, device=settings.device, threads=settings.threads, patience=0)
    if "distill" in text:
        return replace(training, epochs=settings.distill_epochs)
    return replace(training, epochs=max(settings.recovery_epochs, 1), lr=training.lr * settings.recovery_rate)


def _make_variant(
    workspace: Workspace, run: RunFolder, subject: Subject, spec: TrainSpec, text: str, path: Path
) -> dict[str, Any]:
    """Change the network, train it, store it, and return what its file predicts."""
    name, share = (ORIGINAL, 0.0) if text == ORIGINAL else parse_method(text)
    network, architecture, loss = _changed(subject, name, share)
    opening = open_run_of_process(workspace, NAME, run, {"method": text, "subject": subject.name},
                                  subject.device.processes, threads=subject.device.threads, mirror="off")  # fmt: skip
    with opening as (opened, checkpoints):
        history: list = []
        if share:
            result = run_training_loop(
                network, len(subject.feed), subject.feed, loss, spec, subject.device,
                identity={"model": NAME, "settings": {"method": text, **spec.identity()}, "data": subject.fingerprint},
                validation=Validation(lambda: subject.validation_loss(network)),
                callbacks=opened.callbacks if opened else (), checkpoints=checkpoints,
            )  # fmt: skip
            history = result.history
        zeros, parameters = share_of_zeros(network), sum(one.numel() for one in network.parameters())
        size = save_variant(path, subject.name, Variant(text, network, architecture, name if name in INT8 else ""))
        # What is reported is what the file predicts.
        outcomes_N = subject.outcomes(load_variant(path, subject.name, subject.build).network)
        low, high = subject.interval(outcomes_N)
        facts = {"recipe": NAME, "method": text, "bytes": size, "parameters": parameters, "zeros": zeros,
                 "quality": float(outcomes_N.mean()), "low": low, "high": high, "history": history}  # fmt: skip
        if opened is not None:
            opened.finish(facts, {"quality": facts["quality"], "bytes": size})
    return facts


def _changed(subject: Subject, name: str, share: float) -> tuple[Any, Mapping[str, Any], Callable]:
    """Return a changed copy of the subject's network, its architecture, and the loss that it is trained with."""
    if name == "distill":
        architecture = subject.smaller(share)
        return subject.build(architecture), architecture, distillation_loss(subject)
    if name == "structured":
        return *subject.remove(share), subject.loss
    network = subject.build(subject.architecture)
    network.load_state_dict(subject.network.state_dict())
    if name == "magnitude":
        prune_by_magnitude(network, share)
    return network, subject.architecture, subject.loss


def distillation_loss(subject: Subject) -> Callable[[nn.Module, tuple], tuple[Tensor, Tensor]]:
    """Return the loss of a student: half the labels', half the divergence from the original's probabilities.

    Source: Hinton, Vinyals and Dean 2015, section 2.
    """
    original = subject.network.eval().requires_grad_(False)

    def loss(network: nn.Module, batch: tuple) -> tuple[Tensor, Tensor]:
        hard, weight = subject.loss(network, batch)
        with torch.no_grad():
            wanted_MC, _ = subject.logits(original, batch)
        logits_MC, weight_M = subject.logits(network, batch)
        wanted_MC, logits_MC = (F.log_softmax(one.float() / TEMPERATURE, -1) for one in (wanted_MC, logits_MC))
        apart_M = F.kl_div(logits_MC, wanted_MC, reduction="none", log_target=True).sum(-1)
        return HARD * hard + (1 - HARD) * TEMPERATURE**2 * (apart_M * weight_M).sum(), weight

    return loss


@torch.no_grad()
def measure_latencies(networks: Sequence[Any], predict: Callable[[Any], object], rounds: int) -> list[float]:
    """Return the median seconds of one prediction of each network, on one thread of the CPU; they take turns."""
    networks, threads = [network.cpu().eval() for network in networks], torch.get_num_threads()
    torch.set_num_threads(1)
    seconds = np.zeros((rounds, len(networks)))
    try:
        for turn in range(-5, rounds):
            for at, network in enumerate(networks):
                began = time.perf_counter()
                predict(network)
                if turn >= 0:
                    seconds[turn, at] = time.perf_counter() - began
    finally:
        torch.set_num_threads(threads)
    return np.median(seconds, 0).tolist()


def _table(
    subject: Subject, rows: Sequence[dict], latencies: Sequence[float], outcomes: Sequence[np.ndarray]
) -> list[dict[str, Any]]:
    """Return the rows with latency, difference from the original, the Pareto front and a note."""
    table = []
    for row, seconds, outcomes_N in zip(rows, latencies, outcomes, strict=True):
        table.append({name: value for name, value in row.items() if name not in ("history", "recipe")} | {
            "p50_ms": 1000 * seconds, "difference": float((outcomes_N - outcomes[0]).mean()),
        })  # fmt: skip
    for row in table:
        row["pareto"] = not any(_dominates(other, row) for other in table)
        row["note"] = _note(row, table[0])
    return table


def _dominates(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return True where `one` is nowhere worse than `other` in size, latency and quality, and somewhere better."""
    ours, theirs = ((row["bytes"], row["p50_ms"], -row["quality"]) for row in (one, other))
    return all(a <= b for a, b in zip(ours, theirs, strict=True)) and ours != theirs


def _note(row: Mapping[str, Any], original: Mapping[str, Any]) -> str:
    """Return what a reader must know of a row."""
    if row is original:
        return ""
    notes = []
    faster = original["p50_ms"] / row["p50_ms"]
    if row["method"].startswith("magnitude"):
        notes.append(f"{row['zeros']:.0%} zeros, stored and multiplied like other numbers: sparse without speed")
    elif faster < 1.05:
        notes.append("not faster here")
    if row["bytes"] >= original["bytes"] and not row["method"].startswith("magnitude"):
        notes.append("not smaller")
    if row["high"] < original["low"]:
        notes.append("clearly worse")
    return "; ".join(notes)


def write_table(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write table.tsv, table.json and table.png."""
    columns = ("method", "bytes", "parameters", "zeros", "p50_ms", "quality", "low", "high", "difference", "pareto",
               "note")  # fmt: skip
    lines = ["\t".join(columns)]
    lines += ["\t".join(f"{row[one]:.6f}" if isinstance(row[one], float) else str(row[one]) for one in columns)
              for row in facts["rows"]]  # fmt: skip
    files.write(folder / "table.tsv", ("\n".join(lines) + "\n").encode())
    files.write_json(folder / "table.json", facts)
    figure = draw_compression(facts["rows"], facts["quality"], f"{facts['subject']}: compressed")
    files.replace(folder / "table.png", lambda target: figure.savefig(target, format="png", dpi=110))


def summary(facts: Mapping[str, Any]) -> str:
    """Return the table as text."""
    lines = [f"{facts['subject']}, {facts['test_rows']:,} test rows; * on the Pareto front of size, latency, "
             f"{facts['quality']}",
             f"  {'method':28} {'MB':>8} {'p50 ms':>8} {'quality (95 %)':>26}"]  # fmt: skip
    for row in facts["rows"]:
        quality = f"{row['quality']:.4f} ({row['low']:.4f} to {row['high']:.4f})"
        lines.append(f"{'*' if row['pareto'] else ' '} {row['method']:28} {row['bytes'] / 1e6:8.3f}"
                     f" {row['p50_ms']:8.2f} {quality:>26}  {row['note']}")  # fmt: skip
    return "\n".join([*lines, f"table: {facts['folder']}"])
